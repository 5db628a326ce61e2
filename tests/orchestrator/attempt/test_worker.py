"""The worker process: memory limit, thinned beats, classification of exceptions, end with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from waiting import wait_for

from jobs.schema.states import PointState
from orchestrator.attempt import protocol, worker
from orchestrator.attempt.worker import BEAT_INTERVAL_S, Events, classify, run_point

ROOT = Path(__file__).resolve().parents[3]


def python(code: str, timeout: float = 60) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def events_of(read: int) -> list[protocol.Event]:
    return [protocol.decode_event(line) for line in os.read(read, 1 << 20).splitlines()]


def snippet(code: str) -> protocol.Run:
    return protocol.Run("snippet", {"code": code}, "cpu", None, None)


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, Events(write)
    os.close(read)
    os.close(write)


def test_the_memory_limit_counts_from_the_start_and_ends_with_the_block() -> None:
    told = python(
        """
        from orchestrator.attempt.memory_limit import memory_limit
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
    assert told.split("\n")[:2] == ["refused", "free again"]


def test_a_tensor_beyond_the_memory_limit_is_oom() -> None:
    told = python(
        """
        import torch
        from orchestrator.attempt.memory_limit import memory_limit
        from orchestrator.attempt.worker import classify
        try:
            with memory_limit("cpu", 200 << 20):
                torch.ones(100 << 20)
        except RuntimeError as err:
            print(classify(err))
        """
    )
    assert told.strip() == "oom"


def test_no_memory_limit_sets_no_rlimit() -> None:
    assert "RLIM" not in python(
        """
        import resource
        from orchestrator.attempt.memory_limit import memory_limit
        with memory_limit("cpu", None):
            if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY: print("RLIM")
        """
    )


def test_out_of_memory_errors_are_recognised() -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    def raised_from(cause: Exception) -> Exception:
        err = ValueError("while measuring")
        err.__cause__ = cause
        return err

    assert classify(MemoryError()) is PointState.OOM
    assert classify(OutOfMemoryError("CUDA out of memory")) is PointState.OOM
    assert classify(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")) is PointState.OOM
    assert classify(raised_from(MemoryError())) is PointState.OOM
    assert classify(RuntimeError("shapes do not match")) is PointState.ERROR
    assert classify(raised_from(KeyError("x"))) is PointState.ERROR
    assert classify(ValueError("CUDA out of memory")) is PointState.ERROR  # the text alone does not decide


def test_beats_of_a_phase_are_thinned_but_a_new_phase_is_sent(pipe, monkeypatch) -> None:
    read, events = pipe
    clock = [7.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for done in range(100):
        events.beat("timing", done, 100)
    events.beat("memory")
    clock[0] += BEAT_INTERVAL_S + 0.001
    events.beat("memory", 1, 2)
    beats = [protocol.Beat("timing", 0, 100), protocol.Beat("memory", 0, 0), protocol.Beat("memory", 1, 2)]
    assert events_of(read) == beats


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')"])
def test_a_metric_that_is_not_finite_is_an_error(pipe, value: str, snippet_kind) -> None:
    event = run_point(snippet(f"value = {value}"), pipe[1])
    assert isinstance(event, protocol.Failure)
    assert event.state is PointState.ERROR
    assert "not finite" in event.reason


def test_an_exception_is_a_failure_with_its_traceback(pipe, snippet_kind) -> None:
    event = run_point(snippet("raise KeyError('missing')"), pipe[1])
    assert isinstance(event, protocol.Failure)
    assert (event.state, event.reason) == (PointState.ERROR, "KeyError: 'missing'")
    [file] = event.files
    assert file.name == "traceback.txt"
    assert "Traceback" in Path(file.path).read_text()


@pytest.mark.parametrize("base", ["RuntimeError", "ValueError"])
@pytest.mark.parametrize("text", ["5", "1 / 0"])
def test_an_exception_without_a_text_is_a_failure(pipe, snippet_kind, base: str, text: str) -> None:
    event = run_point(snippet(f"class Odd({base}):\n  def __str__(self): return {text}\nraise Odd"), pipe[1])
    assert isinstance(event, protocol.Failure)
    assert (event.state, event.reason) == (PointState.ERROR, "Odd")
    assert "Odd" in Path(event.files[0].path).read_text()


def test_an_exception_with_a_text_that_is_no_unicode_is_readable(pipe, snippet_kind) -> None:
    event = run_point(snippet(r"raise ValueError('caf\udcff')"), pipe[1])
    assert isinstance(event, protocol.Failure)
    assert event.reason == r"ValueError: caf\udcff"
    assert r"caf?" in Path(event.files[0].path).read_text()


def test_sigterm_while_a_point_is_prepared_cancels_it(pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []

    def imported(_name: str) -> SimpleNamespace:
        signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(QUANTITIES=(), measure=measured.append)

    monkeypatch.setattr(worker, "kind_module", imported)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        event = run_point(snippet(""), pipe[1])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert isinstance(event, protocol.Failure)
    assert event.state is PointState.CANCELLED
    assert event.reason == ("Interrupted: SIGTERM came before the measurement had begun: nsa submit SPEC --resume RUN")
    assert measured == []


PARENT = """
    import sys, time
    from orchestrator.attempt import protocol
    from orchestrator.attempt.child import Child
    child = Child(threads=1)
    while not child.events(0.2): pass
    child.send(protocol.Run("snippet", {"code": sys.argv[1]}, "cpu", None))
    while not (beats := [e for e in child.events(0.2) if isinstance(e, protocol.Beat)]): pass
    print(child.pid, beats[0].done, child.temporary.parent, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["running", "unable to act", "killed with it"])
def test_a_child_does_not_outlive_its_parent(how: str, kinds_path: dict[str, str]) -> None:
    code = """import subprocess, time
other = subprocess.Popen(['sleep', '600'])
beat('on', other.pid)
time.sleep(600)"""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), code],
        cwd=ROOT,
        env=os.environ | kinds_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    *pids, folder = parent.stdout.readline().split()
    child, grandchild = (psutil.Process(int(pid)) for pid in pids)
    assert Path(folder, "stdout").exists()
    if how == "killed with it":  # as Ray ends its worker whose node is lost: the children, but not what they started
        for process in psutil.Process(parent.pid).children():
            process.kill()
    if how == "unable to act":  # as if stuck in a driver call: its thread cannot read the end of stdin
        child.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child, grandchild], timeout=10)[1] == []
    wait_for(lambda: not Path(folder).exists(), 10)  # its files may be checkpoints
