"""Ctrl-C while a command is imported: exit code 130 and not a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)\n"
JOBS = ["-m", "jobs", "--help"]


def console_script() -> list[str]:
    """Arguments of Python for what pip makes of the console script `nsa`."""
    module, _, call = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["nsa"].partition(":")
    return ["-c", f"import sys; from {module} import {call}; sys.exit({call}())", "runs"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT's handling, which processes started here inherit; tests that a shell runs in the background lack it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("command", "package"),
    [
        (console_script(), "typer"),
        (console_script(), "pydantic_settings"),
        (JOBS, "pydantic"),
    ],
    ids=["nsa-typer", "nsa-settings", "jobs-pydantic"],
)
def test_ctrl_c_during_imports_ends_without_a_traceback(tmp_path: Path, command: list[str], package: str) -> None:
    """A package that the command imports at its beginning is replaced by one in which the signal arrives."""
    (tmp_path / f"{package}.py").write_text(INTERRUPTED)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "NSA_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
