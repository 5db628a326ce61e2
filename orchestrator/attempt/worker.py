"""The child process that points are measured in: `python -m orchestrator.attempt.worker EVENTS_FD`.

It reads commands from stdin and writes events to the pipe `EVENTS_FD` (orchestrator.attempt.protocol). It does not
outlive its parent: end of file on stdin kills its process group; should the worker be unable to act, the parent's
guard does (orchestrator.attempt.child).
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
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.kinds import kind_module
from jobs.point import Device, Measurement
from jobs.quantities import Quantities
from orchestrator.attempt import protocol
from orchestrator.attempt.sampling import SamplingReporter
from orchestrator.states import PointState

BEAT_INTERVAL_S = 0.2
"""Beats of one phase that follow sooner are dropped, to keep pipe writes out of timing loops."""

_PIECE = 1 << 20  # characters of a text that are encoded at a time

_OOM_TEXTS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)


class Events:
    """The pipe to the parent. Thread-safe."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._lock = threading.Lock()
        self._last_beat = ("", -math.inf)

    def send(self, event: protocol.Event) -> None:
        data = memoryview(protocol.encode(event))
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def beat(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report progress of the measurement (jobs.point.Beat)."""
        now = time.monotonic()
        last_phase, last_at = self._last_beat
        if phase == last_phase and now - last_at < BEAT_INTERVAL_S:
            return
        self._last_beat = (phase, now)
        self.send(protocol.Beat(phase, int(done or 0), int(total or 0)))


def main(argv: list[str]) -> None:
    events = Events(int(argv[1]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks on stderr where py-spy may not attach
    commands = _commands()
    events.send(protocol.Ready(os.getpid()))
    while True:
        match commands.get():
            case protocol.Exit():
                return
            case protocol.Probe() as probe:
                events.send(_probe(probe))
            case protocol.Run() as run:
                events.send(run_point(run, events))
            case protocol.ProtocolError() as err:
                events.send(protocol.Failure(PointState.ERROR, f"the worker cannot read its command: {err}"))
        _tidy()


def run_point(run: protocol.Run, events: Events) -> protocol.Result | protocol.Failure:
    """Measure one point; any exception becomes a Failure."""
    try:
        kind = kind_module(run.kind)
        events.send(protocol.Environment(_environment(run.device, run.settings)))
        declared = Quantities(kind.QUANTITIES)
        with memory_limit(run.device, run.memory_bytes), sampling(events, declared) as beat:
            measurement = kind.measure(run.config, beat)
        _check(measurement, declared)
        return protocol.Result(replace(measurement, files={}), leave(measurement.files, run.folder))
    except Exception as err:
        return _failure(err, run.folder)


@contextlib.contextmanager
def sampling(events: Events, declared: Quantities) -> Iterator[SamplingReporter]:
    """The reporter of a measurement; its last samples are sent however the block ends."""
    reporter = SamplingReporter(events.beat, events.send, declared)
    try:
        yield reporter
    finally:
        reporter.close()


def leave(files: Mapping[str, str | os.PathLike[str]], folder: str | None) -> tuple[protocol.File, ...]:
    """The files of a point, for its supervisor to keep. Texts are written to `folder`, under names made here.

    Raises:
        TypeError: a name that is no text, or something that is neither a text nor a path.
    """
    return tuple(_left(name, content, folder) for name, content in files.items())


def _left(name: str, content: str | os.PathLike[str], folder: str | None) -> protocol.File:
    if not isinstance(name, str):
        raise TypeError(f"files[{name!r}]: the name is not a text")
    if isinstance(content, os.PathLike):
        return protocol.File(name, os.path.abspath(os.fsdecode(content)))
    if not isinstance(content, str):
        raise TypeError(f"files[{name!r}]: {type(content).__name__} is neither a text nor the Path of a file")
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix="file-")
        with open(handle, "w", encoding="utf-8", errors="replace", newline="") as out:
            for start in range(0, len(content), _PIECE):
                out.write(content[start : start + _PIECE])
    except OSError as err:
        return protocol.File(name, "", f"its text could not be written: {err}")
    return protocol.File(name, path)


def classify(err: BaseException) -> PointState:
    """OOM if the exception, or one in its chain of causes, means that memory ran out; else ERROR."""
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return PointState.OOM
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _OOM_TEXTS):
            return PointState.OOM
        cause = cause.__cause__
    return PointState.ERROR


@contextlib.contextmanager
def memory_limit(device: Device, limit: int | None) -> Iterator[None]:
    """Limit the block's memory: on CUDA to `limit` bytes of the card, on a CPU to `limit` private bytes beyond now."""
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
    # RLIMIT_DATA counts private writable mappings only; RLIMIT_AS would also count libraries and reservations.
    try:
        import resource

        status = Path("/proc/self/status").read_text()
    except (ImportError, OSError):  # not Linux: not enforced
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


def _check(measurement: Measurement, declared: Quantities) -> None:
    """Raise ValueError for a metric that is not as declared, or not finite."""
    for metric in measurement.metrics:
        unit = declared.of(metric.name, "").unit
        if unit != metric.unit:
            problem = f"is declared in {unit}" if unit else "is not declared"
            raise ValueError(f"metric {metric.name} in {metric.unit}: {problem}; mend the kind's QUANTITIES")
        if not all(map(math.isfinite, (metric.value, *metric.samples))):
            raise ValueError(f"metric {metric.name} is not finite (value {metric.value}); a failure is not a number")


def _failure(err: Exception, folder: str | None = None) -> protocol.Failure:
    text = str(err).strip().splitlines()
    reason = f"{type(err).__name__}: {text[0]}" if text else type(err).__name__
    reason = reason.encode(errors="backslashreplace").decode()  # a journal takes no lone surrogates
    files = {"traceback.txt": "".join(traceback.format_exception(err)), **_cuda_memory()}
    return protocol.Failure(classify(err), reason, leave(files, folder))


def _environment(device: str, settings: Sequence[str]) -> dict[str, Any]:
    """The point's environment, with the effective values of `settings`; without these {} for a kind without torch."""
    found: dict[str, Any] = {}
    try:
        if settings:  # before anything else uses CUDA: the point's process is as it will be measured
            found["settings"] = importlib.import_module("jobs.measure.variables").effective(settings)
        if (torch := sys.modules.get("torch")) is not None:
            found |= importlib.import_module("jobs.measure.environment").environment(torch.device(device))
    except Exception as err:
        found["unknown"] = f"{type(err).__name__}: {err}"
    return found


def _cuda_memory() -> dict[str, str]:
    """The CUDA allocator's statistics as artifacts; {} where CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    with contextlib.suppress(Exception):  # must not replace the failure that it explains
        return {
            "memory_summary.txt": torch.cuda.memory_summary(),
            "memory_stats.json": json.dumps(torch.cuda.memory_stats(), indent=1),
        }
    return {}


def _probe(probe: protocol.Probe) -> protocol.Machine | protocol.Failure:
    try:
        machine = importlib.import_module("jobs.measure.machine").probe(probe.device)
        if probe.kind is not None:
            kind_module(probe.kind)
        if not probe.settings:
            return protocol.Machine(machine)
        variables = importlib.import_module("jobs.measure.variables")
        gpus = float(machine.device == "cuda") if probe.gpus is None else probe.gpus
        reasons = {name: variables.refusal(name, machine.device, gpus) for name in probe.settings}
        effective = variables.effective([name for name, reason in reasons.items() if reason is None])
        return protocol.Machine(machine, effective, {name: reason for name, reason in reasons.items() if reason})
    except Exception as err:
        return _failure(err)


def _tidy() -> None:
    """Release memory before a warm worker's next point."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # a failed kernel broke the context; the parent discards this worker
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _commands() -> queue.SimpleQueue[protocol.Command | protocol.ProtocolError]:
    """The queue of the parent's commands, filled by a thread that kills this process group at end of file.

    stdin moves to a descriptor that the measurement's subprocesses do not inherit.
    """
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    commands: queue.SimpleQueue[protocol.Command | protocol.ProtocolError] = queue.SimpleQueue()

    def read() -> None:
        for line in source:
            try:
                commands.put(protocol.decode_command(line))
            except protocol.ProtocolError as err:
                commands.put(err)
        if os.getpgrp() == os.getpid():  # started by a supervisor; never kill a shell's group
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


if __name__ == "__main__":
    main(sys.argv)
