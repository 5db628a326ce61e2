"""Calls in a process of their own, whose hang or crash is a result."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import descendants, is_alive

from jobs.process.trial import run_trial
from jobs.process.watch import Limits
from jobs.schema.states import PointState as End

pytestmark = pytest.mark.usefixtures("own_temporary_folder")
LIMITS = Limits(startup_s=30, heartbeat_s=1.5, whole_s=30)
CODE = """
import os, signal, time

def run(config, beat):
    beat("begun", 1, 2)
    return {"value": eval(config["code"], {"os": os, "signal": signal, "time": time, "beat": beat, "config": config})}
"""


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module for processes of trials, which imports no more than it needs."""
    (tmp_path / "tried_here.py").write_text(CODE)
    sources = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{sources}")
    return "tried_here"


def _quiet(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("code", "end", "reason"),
    [
        ("6 * 7", End.OK, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", End.CRASH, "killed by SIGSEGV (last in phase 'begun')"),
        ("os._exit(3)", End.CRASH, "exited with code 3 and no result (last in phase 'begun')"),
        ("time.sleep(60)", End.HANG, "no progress for 1.5 s (last in phase 'begun')"),
        ("1 / 0", End.ERROR, "ZeroDivisionError: division by zero"),
        ("bytearray(2**62)", End.OOM, "MemoryError"),
    ],
)
def test_a_trial_ends_in_its_own_way(sizes: str, code: str, end: End, reason: str) -> None:
    beats: list[tuple[Any, ...]] = []
    limits = LIMITS if end is End.HANG else replace(LIMITS, heartbeat_s=30)
    trial = run_trial(f"{sizes}:run", {"code": code}, limits, lambda *beat: beats.append(beat))
    assert (trial.end, trial.reason) == (end, reason)
    assert trial.value == ({"value": 42} if end is End.OK else {})
    assert ("begun", 1, 2) in beats or end is not End.HANG
    assert ("tried_here.py" in trial.stderr) == (end is not End.OK and "_exit" not in code)  # stacks or traceback
    assert not descendants(psutil.Process(), "jobs.process.trial")


def test_a_slow_trial_is_a_timeout_and_its_parent_is_told_of_silence(sizes: str) -> None:
    limits = Limits(30, 30, 5)
    beats: list[str] = []
    trial = run_trial(f"{sizes}:run", {"code": "time.sleep(60)"}, limits, lambda phase, *_: beats.append(phase))
    assert (trial.end, trial.reason) == (End.TIMEOUT, "not done after 5 s (last in phase 'begun')")
    assert len(beats) >= 2  # a point whose trial says nothing for long is not itself hung


def test_a_trial_ends_with_its_parent(sizes: str) -> None:
    """A cancelled point's process group is killed."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        run_trial(f"{sizes}:run", {"code": "time.sleep(60)"}, Limits(60, 60, 60), _quiet)
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (found := descendants(psutil.Process(pid), "jobs.process.trial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while is_alive(found[0]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(found[0])
