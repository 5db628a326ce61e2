"""Limits of a process's memory, its failures, and its end with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from processes import is_alive

from jobs.process.child import Child, DeadlineWatch, ran_out_of_memory
from jobs.process.messages import Probe

ROOT = Path(__file__).resolve().parents[3]


def python(code: str) -> str:
    """The output of a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_memory_limit_counts_from_the_start_and_ends_with_the_block() -> None:
    output = python(
        """
        from jobs.process.memory_limit import memory_limit
        before = bytearray(300 << 20)                      # in use before: does not count
        with memory_limit("cpu", 200 << 20):
            within = bytearray(100 << 20)
            try:
                beyond = bytearray(150 << 20)
            except MemoryError:
                print("refused")
        after = bytearray(400 << 20)
        print("free again")
        """
    )
    assert output.split("\n")[:2] == ["refused", "free again"]


def test_out_of_memory_errors_are_recognised() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    def raised_from(cause: Exception) -> Exception:
        err = ValueError("while measuring")
        err.__cause__ = cause
        return err

    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(OutOfMemoryError("CUDA out of memory"))
    assert ran_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."))
    assert ran_out_of_memory(raised_from(MemoryError()))
    assert not ran_out_of_memory(RuntimeError("shapes do not match"))
    assert not ran_out_of_memory(raised_from(KeyError("x")))
    assert not ran_out_of_memory(ValueError("CUDA out of memory")), "the text alone does not decide"


FAMILY = """
    import subprocess, time
    from jobs.process.messages import Beat
    def answer(command, channel):
        channel.send(Beat(str(subprocess.Popen(["sleep", "600"]).pid)))
        time.sleep(600)
"""
PARENT = """
    import time
    from jobs.process.child import Child
    from jobs.process.messages import Beat, Probe
    child = Child("family:answer")
    child.send(Probe("cpu"))
    while not (beats := [event for event in child.inbox.receive(0.2) if isinstance(event, Beat)]): pass
    print(child.pid, beats[0].phase, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["unable to act", "killed with it"])
def test_a_process_and_its_group_do_not_outlive_its_parent(how: str, tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(textwrap.dedent(FAMILY))
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child, grandchild = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    if how == "killed with it":  # as Ray ends its worker whose node is lost: the children, but not what they started
        child.kill()
    if how == "unable to act":  # as if stuck in a driver call
        child.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child, grandchild], timeout=10)[1] == []


SHEDDING = """
    import subprocess, sys, time
    from jobs.process.messages import Beat
    def answer(command, channel):
        start = "print(subprocess.Popen(['sleep', '600'], start_new_session=True, env={}, stdout=2).pid)"
        daemon = subprocess.run([sys.executable, "-c", f"import subprocess; {start}"], stdout=subprocess.PIPE, env={})
        channel.send(Beat(daemon.stdout.decode().strip()))
        time.sleep(600)
"""


def test_a_daemon_without_the_points_variables_ends_with_the_point_that_died(tmp_path: Path) -> None:
    (tmp_path / "shedding.py").write_text(textwrap.dedent(SHEDDING))
    child = Child("shedding:answer", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    watch = DeadlineWatch(child)
    child.send(Probe("cpu"))
    while not watch.phase:
        watch.step()
    daemon = psutil.Process(int(watch.phase))
    assert daemon.environ() == {}
    os.kill(child.pid, signal.SIGKILL)
    child.discard()
    assert not is_alive(daemon)
