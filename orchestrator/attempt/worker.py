"""The child process that points are measured in: `python -m orchestrator.attempt.worker EVENTS_FD`.

Commands come as JSON lines on stdin, events go as JSON lines to the pipe `EVENTS_FD`; stdout and stderr stay free for
what the measurement prints. The process does not outlive its parent: end of file on stdin kills its whole group (and
where it cannot act any more, the parent's guard does: orchestrator.attempt.child).

Commands:
    {"type": "probe", "device": "auto"}                     -> {"type": "machine", ...} or {"type": "failure", ...}
    {"type": "run", "kind", "config", "device", "memory"}
        -> {"type": "environment", ...}, {"type": "beat", ...} any number of times, then "result" or "failure"
    {"type": "exit"}
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.kinds import kind_module
from jobs.point import Measurement
from orchestrator.states import PointState

BEAT_INTERVAL_S = 0.2
"""Beats of one phase that come faster are not sent: a pipe write has no place inside a timing loop."""

_OOM_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


class Events:
    """The pipe to the parent. Safe to use from several threads."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._lock = threading.Lock()
        self._last_beat = ("", -math.inf)

    def send(self, event: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(event, default=str).encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def beat(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Tell that the measurement got further (jobs.point.Beat)."""
        now = time.monotonic()
        last_phase, last_at = self._last_beat
        if phase == last_phase and now - last_at < BEAT_INTERVAL_S:
            return
        self._last_beat = (phase, now)
        self.send({"type": "beat", "phase": phase, "done": done, "total": total})


def main(argv: list[str]) -> None:
    events = Events(int(argv[1]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks on stderr where py-spy may not attach
    commands = _commands()
    events.send({"type": "ready", "pid": os.getpid()})
    while (command := commands.get())["type"] != "exit":
        events.send(_probe(command) if command["type"] == "probe" else run_point(command, events))
        _tidy()


def run_point(command: Mapping[str, Any], events: Events) -> dict[str, Any]:
    """Measure one point; what it brought home, or why it failed, as an event."""
    try:
        kind = kind_module(command["kind"])
        events.send({"type": "environment", "environment": _environment(command["device"])})
        with memory_limit(command["device"], command["memory"]):
            return _result(kind.measure(command["config"], events.beat))
    except Exception as err:
        return _failure(err)


def classify(err: BaseException) -> PointState:
    """OOM where the exception, or one that it was raised from, says that memory ran out; else ERROR."""
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return PointState.OOM
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _OOM_TEXTS):
            return PointState.OOM
        cause = cause.__cause__
    return PointState.ERROR


@contextlib.contextmanager
def memory_limit(device: str, limit: int | None) -> Iterator[None]:
    """Let the block use at most `limit` bytes more than now: of the card on CUDA, of private memory on a CPU."""
    if limit is None:
        yield
    elif device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        with _data_limit(limit):
            yield


@contextlib.contextmanager
def _data_limit(limit: int) -> Iterator[None]:
    # RLIMIT_DATA counts private writable mappings only: unlike RLIMIT_AS it is not spent on libraries and reservations.
    try:
        import resource

        status = Path("/proc/self/status").read_text()
    except (ImportError, OSError):  # not Linux: the limit stays a prediction
        yield
        return
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    target = used + limit if hard == resource.RLIM_INFINITY else min(used + limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (target, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _result(measurement: Measurement) -> dict[str, Any]:
    for metric in measurement.metrics:
        if not all(map(math.isfinite, (metric.value, *metric.samples))):
            raise ValueError(f"metric {metric.name} is not finite (value {metric.value}); a failure is no number")
    return {"type": "result", **asdict(measurement)}


def _failure(err: Exception) -> dict[str, Any]:
    text = str(err).strip().splitlines()
    reason = f"{type(err).__name__}: {text[0]}" if text else type(err).__name__
    files = {"traceback.txt": "".join(traceback.format_exception(err)), **_cuda_memory()}
    return {"type": "failure", "state": classify(err), "reason": reason, "files": files}


def _environment(device: str) -> dict[str, Any]:
    """The surroundings, told before the measurement, so that they are known of points that never come back, too."""
    torch = sys.modules.get("torch")
    if torch is None:  # a kind without it
        return {}
    try:
        return importlib.import_module("jobs.measure.environment").environment(torch.device(device))
    except Exception as err:
        return {"unknown": f"{type(err).__name__}: {err}"}


def _cuda_memory() -> dict[str, str]:
    """The allocator's own account, where CUDA is in use; it must not replace the failure that it explains."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    with contextlib.suppress(Exception):
        return {
            "memory_summary.txt": torch.cuda.memory_summary(),
            "memory_stats.json": json.dumps(torch.cuda.memory_stats(), indent=1),
        }
    return {}


def _probe(command: Mapping[str, Any]) -> dict[str, Any]:
    try:
        machine = importlib.import_module("jobs.measure.machine").probe(command["device"])
        return {"type": "machine", **asdict(machine)}
    except Exception as err:
        return _failure(err)


def _tidy() -> None:
    """What a warm worker owes to its next point: memory given back."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # a failed kernel left the context broken; the parent throws us away
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _commands() -> queue.SimpleQueue[dict[str, Any]]:
    """The parent's commands, read by a thread that kills the group when the parent goes away.

    stdin moves to a descriptor that programs started by the measurement do not inherit.
    """
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            commands.put(json.loads(line))
        if os.getpgrp() == os.getpid():  # started by a supervisor; never the shell's group
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


if __name__ == "__main__":
    main(sys.argv)
