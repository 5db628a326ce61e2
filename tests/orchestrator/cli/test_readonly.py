"""Queries of a home that this user may read and not write, as a colleague's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.store import Store

# Root may write everywhere, unless it gives that right away.
AS_USER = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.geteuid() == 0 else []
NSA = [sys.executable, "-c", "from orchestrator.cli.commands import main; main()"]

pytestmark = pytest.mark.skipif(bool(AS_USER) and shutil.which("setpriv") is None, reason="root without setpriv")


@pytest.fixture
def home(tmp_path: Path, sweep: Callable[..., list]) -> Iterator[Path]:
    """A home with a run, which nobody may write to."""
    with Store.open(f"sqlite:///{tmp_path / 'nsa.db'}") as store:
        store.apply_many(sweep("r1", laws={"chunked": 1.0}))
    tmp_path.chmod(0o555)
    yield tmp_path
    tmp_path.chmod(0o755)


def nsa(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "NSA_HOME": str(home), "NSA_RAY_DASHBOARD": "http://127.0.0.1:1"}
    return subprocess.run([*AS_USER, *NSA, *args], env=env, capture_output=True, text=True, timeout=120)


def test_a_home_that_cannot_be_written_is_read_and_judged(home: Path) -> None:
    shown = nsa(home, "show", "r1")
    assert (shown.stderr, "r1" in shown.stdout) == ("", True)
    judged = nsa(home, "gate")
    assert judged.returncode in (1, 3)
    assert "linear-scaling" in judged.stdout
    assert judged.stderr.startswith("warning: NSA_DATABASE_URL: ")
    assert judged.stderr.endswith("; v_gate keeps the verdicts of before\n")
    down = nsa(home, "down")
    assert (down.returncode, down.stderr.count("\n")) == (2, 1)
    assert down.stderr.startswith(f"error: NSA_HOME: '{home}': services cannot be started or stopped there (Permission")
