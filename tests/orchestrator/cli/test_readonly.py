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


@pytest.mark.parametrize(
    ("command", "said"),
    [(["runs"], "r1"), (["show", "r1"], "r1"), (["plan"], "linear-scaling"), (["status"], "Running: none")],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_queries_need_no_right_to_write(home: Path, command: list[str], said: str) -> None:
    done = nsa(home, *command)
    assert done.stderr == ""
    assert said in done.stdout


def test_a_verdict_that_cannot_be_stored_is_given(home: Path) -> None:
    done = nsa(home, "gate")
    assert done.returncode in (1, 3)
    assert "linear-scaling" in done.stdout
    assert done.stderr.startswith("warning: NSA_DATABASE_URL: ")
    assert done.stderr.endswith("; v_gate keeps the verdicts of before\n")


def test_queries_see_what_a_writer_has_not_yet_put_into_the_file(home: Path, sweep: Callable[..., list]) -> None:
    home.chmod(0o755)
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many(sweep("r2", laws={"chunked": 1.0}))
        home.chmod(0o555)
        assert "r2" in nsa(home, "runs").stdout
        home.chmod(0o755)


def test_a_change_is_refused_in_a_line(home: Path) -> None:
    done = nsa(home, "cancel", "r1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_services_of_a_home_that_cannot_be_written_are_refused_in_a_line(home: Path) -> None:
    done = nsa(home, "down")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: NSA_HOME: '{home}': services cannot be started or stopped there (Permission")
    assert done.stderr.count("\n") == 1
