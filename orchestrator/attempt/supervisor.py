"""The parent's side of one worker slot: deadlines, diagnosis and classification of its points.

`supervise` is a generator of updates; it runs in a thread of the driver or inside a Ray task. It needs neither the
driver's disk nor its database: outcomes travel in the updates, and files go from here to the artifact store.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.measure.process_usage import ProcessUsage
from jobs.measure.telemetry import Telemetry
from jobs.point import Measurement, Point
from orchestrator.artifacts import Source
from orchestrator.attempt import diagnostics, gpu_release, protocol
from orchestrator.attempt.child import Child, Violation
from orchestrator.attempt.keeping import keep
from orchestrator.attempt.live import LiveSeries, Pace
from orchestrator.messages import Assignment, Conditions, Progress, Update
from orchestrator.records import EventRecord, MetricData, OutcomeRecord, StartRecord, now
from orchestrator.states import PointState

_POLL_S = 0.2
_PROGRESS_INTERVAL_S = 1.0


class ProbeError(RuntimeError):
    """The machine could not be probed; the text is the child's message."""


def supervise(
    assignments: Sequence[Assignment],
    conditions: Conditions,
    gpus: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Update]:
    """Measure points one after the other in child processes and yield what happens.

    Args:
        gpus: the children's CUDA_VISIBLE_DEVICES; None keeps this process's.
        stopped: polled several times a second; once true, the child is killed and the generator ends at once,
            without an outcome for the current point.
    """
    slot = _Slot(conditions, gpus)
    try:
        for assignment in assignments:
            if stopped():
                return
            yield StartRecord(
                run_id=assignment.run_id,
                point_id=assignment.point_id,
                attempt=assignment.attempt,
                node=socket.gethostname(),
            )
            if (problem := slot.unfit()) is not None:
                yield _not_measured(assignment, problem)
                continue
            if slot.serves_another(assignment.point) and (warning := slot.clear()):
                yield _warning(assignment, warning)
            try:
                child = slot.child(assignment.point)
            except OSError as err:
                yield _not_measured(assignment, f"python: {assignment.point.python!r}: cannot be started ({err})")
                continue
            ended = yield from _watch(child, assignment, conditions, slot.gpu_ids, stopped)
            if ended is None:
                return
            yield ended.outcome
            if conditions.store is not None:
                yield from keep(assignment, ended.files, conditions.store, stopped)
            if not (conditions.warm and ended.outcome.state is PointState.OK) and (warning := slot.clear()):
                yield _warning(assignment, warning)
    finally:
        slot.clear()


def probe(
    wanted: protocol.Probe,
    gpus: str | None = None,
    timeout_s: float = 300,
    *,
    env: Mapping[str, str | None] | None = None,
    python: str | None = None,
) -> protocol.Machine:
    """The machine as a point's process sees it (jobs.measure.machine.probe, run in a child).

    Args:
        gpus, env, python: the child's (orchestrator.attempt.child.Child).

    Raises:
        ProbeError: the probe failed in the child, or the child died or did not answer.
        OSError: the interpreter cannot be started.
    """
    child = Child(threads=1, gpus=gpus, env=env, python=python)
    try:
        child.send(wanted)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            alive = child.alive()
            for event in child.events(_POLL_S):
                match event:
                    case protocol.Machine() as answer:
                        return answer
                    case protocol.Failure(reason=reason) | Violation(reason):
                        raise ProbeError(reason.removeprefix("ValueError: "))
            if not alive:
                exit_ = diagnostics.describe_exit(child.kill())
                raise ProbeError(f"{exit_}: {words}" if (words := child.last_words().strip()) else exit_)
        raise ProbeError(f"no answer within {timeout_s:.0f} s")
    finally:
        child.discard()


class _Slot:
    """A slot's child, started when needed, and its GPUs."""

    def __init__(self, conditions: Conditions, gpus: str | None) -> None:
        self._conditions = conditions
        self._gpus = gpus
        self._child: Child | None = None
        self._serves: tuple[Mapping[str, str], str | None] = ({}, None)  # environment and interpreter of the child
        self.gpu_ids = gpu_release.visible(gpus) if conditions.device == "cuda" else []
        self._baseline = gpu_release.Baseline(None)

    def unfit(self) -> str | None:
        """Reason why no point may be measured here: a GPU that the run is not planned for; None if there is none."""
        planned = self._conditions.card
        for card in map(gpu_release.card_name, self.gpu_ids if planned else []):
            if card not in (planned, None):
                node = socket.gethostname()
                fix = "name one type in resources.accelerator_type, or with --local in CUDA_VISIBLE_DEVICES"
                return f"planned for {planned}, node {node} has {card}; {fix}"
        return None

    def serves_another(self, point: Point) -> bool:
        """Whether the child has another environment or interpreter than the point's."""
        return self._child is not None and self._serves != (point.env, point.python)

    def child(self, point: Point) -> Child:
        """A living child for a point: the warm one, else a new one. Raises OSError if its interpreter cannot start."""
        if self._child is not None and not self._child.alive():
            self.clear()
        if self._child is None:
            self._baseline = gpu_release.Baseline.take(self.gpu_ids)
            threads, gpus = self._conditions.threads, self._gpus
            self._child = Child(threads=threads, gpus=gpus, env=point.env, python=point.python)
            self._serves = (point.env, point.python)
        return self._child

    def clear(self) -> str | None:
        """End the child and wait until its GPUs are free. Returns the obstacle if they do not get free, else None."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        pids = {process.pid for process in child.tree()} | {child.pid}
        child.discard()
        return self._baseline.wait_free(pids)


def _watch(
    child: Child,
    assignment: Assignment,
    conditions: Conditions,
    gpu_ids: Sequence[str],
    stopped: Callable[[], bool],
) -> Generator[Update, None, _Ended | None]:
    """Follow one point to its end. Returns None if stopped before."""
    telemetry = Telemetry(gpu_ids)
    live = LiveSeries(assignment, telemetry if gpu_ids else ProcessUsage(child.tree, conditions.threads))
    watch = _Watch(child, assignment, conditions, live)
    telemetry.start()
    try:
        child.send(watch.command())
        while (ended := watch.step()) is None:
            yield from watch.progress()
            if (piece := live.due()) is not None:
                yield piece
            if stopped():
                return None
    finally:
        sampled = telemetry.stop()
    if (piece := live.rest()) is not None:
        yield piece
    if conditions.device != "cuda":
        return ended
    ended = replace(ended, files=(Source("telemetry.txt", sampled.text), *ended.files))
    if ended.outcome.state is not PointState.OK:
        return ended
    metrics = tuple(MetricData(**vars(metric)) for metric in sampled.metrics)
    known = {metric.name for metric in ended.outcome.metrics}
    added = ended.outcome.metrics + tuple(m for m in metrics if m.name not in known)
    return replace(ended, outcome=ended.outcome.model_copy(update={"metrics": added}))


@dataclass(frozen=True)
class _Ended:
    """End of an attempt, and the files to keep of it."""

    outcome: OutcomeRecord
    files: tuple[Source, ...]


class _Watch:
    """One attempt at one point: its events so far, its deadlines, its outcome."""

    def __init__(self, child: Child, assignment: Assignment, conditions: Conditions, live: LiveSeries) -> None:
        self._child = child
        self._live = live
        self._pace = Pace()
        self._assignment = assignment
        self._conditions = conditions
        self._started_at = now()
        self._start = time.monotonic()
        self._last_sign: float | None = None  # time of the last progress
        self._phase = ""  # of the last progress
        self._unsent: Progress | None = None
        self._sent = ("", 0.0)  # phase and time of the last update
        self._environment: dict[str, Any] = {}
        self._oom_kills = diagnostics.oom_kills()
        self._low_memory = False

    def command(self) -> protocol.Run:
        point, conditions = self._assignment.point, self._conditions
        limit, settings, folder = conditions.memory_bytes, conditions.settings, str(self._child.temporary)
        return protocol.Run(point.kind, dict(point.config), conditions.device, limit, settings, folder)

    def step(self) -> _Ended | None:
        """Handle new events. Returns the outcome, None while the point goes on."""
        alive = self._child.alive()  # asked before reading: events of a child that dies now are still read
        for event in self._child.events(_POLL_S if alive else 0):
            match event:
                case protocol.Beat():
                    self._note(event)
                case protocol.Samples():
                    self._live.take(event)
                case protocol.Environment(environment):
                    self._environment = dict(environment)
                case protocol.Result(measurement, files):
                    return self._measured(measurement, files)
                case protocol.Failure(state, reason, files):
                    return self._ended(state, reason, _sources(files))
                case Violation(reason):
                    return self._ended(PointState.ERROR, reason)
        if not alive:
            return self._died()
        self._low_memory = diagnostics.memory_exhausted()
        return self._overdue()

    def progress(self) -> Iterator[Progress]:
        """The latest progress not sent yet, at most once a second within a phase."""
        sign = self._unsent
        if sign is None:
            return
        phase, at = self._sent
        if sign.phase == phase and time.monotonic() - at < _PROGRESS_INTERVAL_S:
            return
        self._unsent, self._sent = None, (sign.phase, time.monotonic())
        yield sign

    def _note(self, beat: protocol.Beat) -> None:
        self._last_sign, self._phase = time.monotonic(), beat.phase
        run_id, point_id = self._assignment.run_id, self._assignment.point_id
        rate = self._pace.rate(beat.phase, beat.done)
        self._unsent = Progress(run_id, point_id, now(), beat.phase, beat.done, beat.total, rate)

    def _measured(self, measurement: Measurement, files: Sequence[protocol.File]) -> _Ended:
        metrics = tuple(MetricData(**vars(metric)) for metric in measurement.metrics)
        self._environment |= measurement.environment
        return self._ended(PointState.OK, None, _sources(files), metrics=metrics, route=dict(measurement.route))

    def _died(self) -> _Ended:
        code = self._child.kill()
        reason = diagnostics.describe_exit(code)
        if code == -9 and (diagnostics.oom_kills() > self._oom_kills or self._low_memory):
            return self._ended(PointState.OOM, f"{reason} by the kernel, which was out of memory")
        return self._ended(PointState.CRASH, reason)

    def _overdue(self) -> _Ended | None:
        deadlines, clock = self._conditions.deadlines, time.monotonic()
        silent = clock - (self._start if self._last_sign is None else self._last_sign)
        if self._last_sign is None and silent > deadlines.startup_s:
            return self._expired(PointState.HANG, f"no progress within the {deadlines.startup_s:g} s for start-up")
        if self._last_sign is not None and silent > deadlines.heartbeat_s:
            return self._expired(PointState.HANG, f"no progress for {deadlines.heartbeat_s:g} s {self._whereabouts()}")
        if clock - self._start > deadlines.point_s:
            told = self._whereabouts() if self._last_sign is not None else "before its first progress"
            return self._expired(PointState.TIMEOUT, f"not done after {deadlines.point_s:g} s {told}")
        return None

    def _whereabouts(self) -> str:
        return f"(last in phase {self._phase!r})"

    def _expired(self, state: PointState, reason: str) -> _Ended:
        tree = self._child.tree()
        files = [Source(name, text) for name, text in diagnostics.snapshot(tree).items()]
        if tree:
            diagnostics.request_stacks(tree[0])
        if self._child.kill() is None:
            reason += "; the process is stuck in the kernel and did not die of SIGKILL"
        return self._ended(state, reason, files)

    def _ended(self, state: PointState, reason: str | None, files: Sequence[Source] = (), **found: Any) -> _Ended:
        outcome = OutcomeRecord(
            run_id=self._assignment.run_id,
            point_id=self._assignment.point_id,
            attempt=self._assignment.attempt,
            state=state,
            reason=reason,
            started_at=self._started_at,
            environment=self._environment,
            **found,
        )
        return _Ended(outcome, (*self._child.new_output(), *files))


def _sources(files: Sequence[protocol.File]) -> list[Source]:
    return [Source(file.name, Path(file.path), problem=file.problem) for file in files]


def _not_measured(assignment: Assignment, reason: str) -> OutcomeRecord:
    """End of a point whose child was not started."""
    run_id, point_id, attempt = assignment.run_id, assignment.point_id, assignment.attempt
    return OutcomeRecord(
        run_id=run_id, point_id=point_id, attempt=attempt, state=PointState.ERROR, reason=reason, started_at=now()
    )


def _warning(assignment: Assignment, message: str) -> EventRecord:
    return EventRecord(run_id=assignment.run_id, point_id=assignment.point_id, level="warning", message=message)
