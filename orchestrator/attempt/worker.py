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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jobs.process import stacks
from jobs.process.garbage import uncollected
from jobs.schema.plain_text import shortened
from jobs.schema.point import NOWHERE, Interrupted, Measurement, Surroundings
from jobs.schema.quantities import Quantities
from jobs.schema.states import PointState
from jobs.specs.kinds import kind_module
from jobs.training.errors import noting_sigterm
from orchestrator.attempt import protocol
from orchestrator.attempt.description import described
from orchestrator.attempt.memory_limit import memory_limit
from orchestrator.attempt.sampling import SamplingReporter

if TYPE_CHECKING:
    from orchestrator.attempt.ray_launcher import RayLauncher

BEAT_INTERVAL_S = 0.2
"""Beats of one phase that follow sooner are dropped, to keep pipe writes out of timing loops."""

_PIECE = 1 << 20  # characters of a text that are encoded at a time

_REASON = 2_000  # characters
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
        """Report progress of the measurement (jobs.schema.point.Beat)."""
        now = time.monotonic()
        last_phase, last_at = self._last_beat
        if phase == last_phase and now - last_at < BEAT_INTERVAL_S:
            return
        self._last_beat = (phase, now)
        self.send(protocol.Beat(phase, int(done or 0), int(total or 0)))


def main(argv: list[str]) -> None:
    events = Events(int(argv[1]))
    faulthandler.enable()
    stacks.offer()  # for where py-spy may not attach
    explanation = Explanation(events)
    commands = _commands(explanation.send)
    events.send(protocol.Ready(os.getpid()))
    while True:
        match commands.get():
            case protocol.Exit():
                return
            case protocol.Probe() as probe:
                events.send(_probe(probe))
            case protocol.Run() as run:
                events.send(run_point(run, events, explanation))
            case protocol.ProtocolError() as err:
                events.send(protocol.Failure(PointState.ERROR, f"the worker cannot read its command: {err}"))
        _tidy()


class Explanation:
    """Answers Explain: asks the launcher of the running point's ranks, if there is one.

    Attributes:
        launcher: the launcher; None: none.
        folder: for the files.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self.launcher: RayLauncher | None = None
        self.folder: str | None = None

    def send(self) -> None:
        """Send Explained; called by the thread that reads the commands."""
        files: Mapping[str, str] = {}
        if self.launcher is not None:
            try:
                files = self.launcher.explain()
            except Exception as err:
                files = {"stacks-of-ranks.txt": f"not found: {type(err).__name__}: {err}"}
        self._events.send(protocol.Explained(leave(files, self.folder)))


def run_point(
    run: protocol.Run, events: Events, explanation: Explanation | None = None
) -> protocol.Result | protocol.Failure:
    """Measure one point; any exception becomes a Failure."""
    explanation = explanation or Explanation(events)
    explanation.launcher, explanation.folder = None, run.folder
    try:
        with contextlib.ExitStack() as block:
            with noting_sigterm() as asked:  # imports take seconds
                kind, declared, beat = _prepared(run, events, explanation, block)
            if asked.is_set():
                raise Interrupted("SIGTERM came before the measurement had begun: nsa submit SPEC --resume RUN")
            measurement = kind.measure(run.config, beat)
        if explanation.launcher is not None:
            measurement = explanation.launcher.metered(measurement)
        _check(measurement, declared)
        return protocol.Result(replace(measurement, files={}), leave(measurement.files, run.folder))
    except Exception as err:
        return _failure(err, run.folder)


def _prepared(
    run: protocol.Run, events: Events, explanation: Explanation, block: contextlib.ExitStack
) -> tuple[Any, Quantities, SamplingReporter]:
    """The point's kind, what it declares, and its reporter; `block` ends the reporter and the limit of the memory."""
    kind = kind_module(run.kind)
    with uncollected():
        for name in getattr(kind, "IMPORTS", ()):
            importlib.import_module(name)
    declared, there, limit = Quantities(kind.QUANTITIES), run.surroundings, run.memory_bytes
    if run.cluster is None:
        events.send(protocol.Environment(described(run.device, run.settings)))
    else:
        from orchestrator.attempt.ray_launcher import RayLauncher

        explanation.launcher = RayLauncher(run, run.cluster, events.send)
        there, limit = replace(there, launcher=explanation.launcher), None  # the ranks' own
    block.enter_context(memory_limit(run.device, limit))
    return kind, declared, block.enter_context(sampling(events, declared, there))


@contextlib.contextmanager
def sampling(
    events: Events,
    declared: Quantities,
    surroundings: Surroundings = NOWHERE,
) -> Iterator[SamplingReporter]:
    """The reporter of a measurement; its last samples are sent however the block ends."""
    reporter = SamplingReporter(events.beat, events.send, declared, surroundings)
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
    """OOM if the exception, or one in its chain of causes, means that memory ran out; CANCELLED if it was asked to end
    and can go on; else ERROR."""
    if isinstance(err, Interrupted):
        return PointState.CANCELLED
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return PointState.OOM
        if isinstance(cause, RuntimeError) and any(text in _said(cause) for text in _OOM_TEXTS):
            return PointState.OOM
        cause = cause.__cause__
    return PointState.ERROR


def _check(measurement: Measurement, declared: Quantities) -> None:
    """Raise ValueError for a metric that is not as declared, not finite, or there twice."""
    names = Counter(metric.name for metric in measurement.metrics)
    for metric in measurement.metrics:
        if names[metric.name] > 1:
            raise ValueError(f"metric {metric.name}: is there {names[metric.name]} times; return one of each name")
        unit = declared.of(metric.name, "").unit
        if unit != metric.unit:
            problem = f"is declared in {unit}" if unit else "is not declared"
            raise ValueError(f"metric {metric.name} in {metric.unit}: {problem}; mend the kind's QUANTITIES")
        if not all(map(math.isfinite, (metric.value, *metric.samples))):
            raise ValueError(f"metric {metric.name} is not finite (value {metric.value}); a failure is not a number")


def _said(err: BaseException) -> str:
    """An error's text; "" of one that cannot be made into a text."""
    try:
        return str(err)
    except Exception:
        return ""


def _failure(err: Exception, folder: str | None = None) -> protocol.Failure:
    text = _said(err).strip().split("\n")[0]  # its file has the whole text
    reason = f"{type(err).__name__}: {shortened(text, _REASON)}" if text else type(err).__name__
    reason = reason.encode(errors="backslashreplace").decode()  # a journal takes no lone surrogates
    files = {"traceback.txt": "".join(traceback.format_exception(err)), **_cuda_memory()}
    return protocol.Failure(classify(err), reason, leave(files, folder))


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
        machine = importlib.import_module("jobs.hardware.machine").probe(probe.device)
        if probe.kind is not None:
            versions = getattr(kind_module(probe.kind), "versions", dict)()
            machine = replace(machine, fingerprint={**machine.fingerprint, **versions})
        if not probe.settings:
            return protocol.Machine(machine)
        variables = importlib.import_module("jobs.hardware.variables")
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


def _commands(explain: Callable[[], None]) -> queue.SimpleQueue[protocol.Command | protocol.ProtocolError]:
    """The queue of the parent's commands, filled by a thread that kills this process group at end of file.

    Explain is answered by the thread itself.

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
                command = protocol.decode_command(line)
                if isinstance(command, protocol.Explain):
                    explain()
                else:
                    commands.put(command)
            except protocol.ProtocolError as err:
                commands.put(err)
        if os.getpgrp() == os.getpid():  # started by a supervisor; never kill a shell's group
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


if __name__ == "__main__":
    main(sys.argv)
