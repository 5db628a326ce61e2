"""The parent's side of one worker slot: its processes, its GPUs, and the points that they measure.

`supervise` is a generator of updates; it runs in a thread of the driver or inside a Ray task. It needs neither the
driver's disk nor its database: outcomes travel in the updates, and files go from here to the artifact store.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.hardware.process_usage import PointUsage
from jobs.hardware.telemetry import Telemetry, TelemetrySummary
from jobs.process import post_mortem, stacks, temporary
from jobs.process.child import Child
from jobs.process.messages import (
    Beat,
    Cluster,
    Environment,
    Explain,
    Explanation,
    Failure,
    File,
    Measured,
    MeasurePoint,
    Note,
    Probe,
    ProbedMachine,
    RanksStarted,
    Samples,
    Warned,
)
from jobs.process.reporter import BeatFilter
from jobs.process.watch import POLL_S, DeadlineWatch, Ended, Limits
from jobs.schema.point import FAILURE_FILES, Point
from jobs.schema.states import PointState
from orchestrator.execute import gpu_release
from orchestrator.execute.artifacts import Source, checkpoints_path
from orchestrator.execute.keeping import Keeping
from orchestrator.execute.live import LiveSeries, Pace
from orchestrator.messages import Assignment, Conditions, Progress, Update
from orchestrator.store.records import EventRecord, MetricData, OutcomeRecord, StartRecord, now

EXPLAIN_S = stacks.STACKS_S + 10.0
"""Seconds that a point's process has to explain ranks on other nodes: their stacks, with Ray's way there and back."""

_ANSWER = "orchestrator.execute.point:answer"
_PROGRESS_INTERVAL_S = 1.0


class ProbeError(RuntimeError):
    """The machine could not be probed; the text is the process's message."""


def supervise(
    assignments: Sequence[Assignment],
    conditions: Conditions,
    gpus: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
    cluster: Cluster | None = None,
) -> Iterator[Update]:
    """Measure points one after the other in processes of their own and yield what happens.

    Args:
        gpus: the processes' CUDA_VISIBLE_DEVICES; None keeps this process's.
        cluster: where the ranks of the points run; None: on this host.
        stopped: polled several times a second; once true, the process is killed and the generator ends at once,
            without an outcome for the current point.
    """
    slot = _Slot(conditions, gpus, stopped)
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
                yield _outcome(assignment, PointState.ERROR, problem)
                continue
            if slot.serves_another(assignment.point) and (obstacle := slot.clear()):
                yield _warning(assignment, obstacle)
            try:
                child = slot.child(assignment.point)
            except OSError as err:
                yield _not_started(assignment, err)
                continue
            with Keeping(assignment, conditions.store) as keeping:
                attempt = _Attempt(child, assignment, conditions, slot.gpu_ids, cluster, keeping)
                outcome = yield from attempt.follow(stopped)
                if outcome is None:
                    return
                yield outcome
                yield from keeping.rest(attempt.files, stopped)
            if not (conditions.warm and outcome.state is PointState.OK) and (obstacle := slot.clear()):
                yield _warning(assignment, obstacle)
    finally:
        slot.clear()


def probe(
    command: Probe,
    gpus: str | None = None,
    timeout_s: float = 300,
    *,
    env: Mapping[str, str | None] | None = None,
    python: str | None = None,
) -> ProbedMachine:
    """The machine as a point's process sees it (jobs.hardware.machine.probe, run in such a process).

    Args:
        gpus, env, python: the process's.

    Raises:
        ProbeError: the probe failed in the process, or that died or did not answer.
        OSError: the interpreter cannot be started.
    """
    child = Child(_ANSWER, env={**_variables(1, gpus), **(env or {})}, python=python)
    try:
        child.send(command)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            alive = child.alive()
            for event in child.events(POLL_S):
                match event:
                    case ProbedMachine():
                        return event
                    case Failure(reason=reason):
                        raise ProbeError(reason.removeprefix("ValueError: "))
            if not alive:
                reason = post_mortem.describe_exit(child.kill())
                raise ProbeError(f"{reason}: {printed}" if (printed := child.tail().strip()) else reason)
        raise ProbeError(f"no answer within {timeout_s:.0f} s")
    finally:
        child.discard()


class _Slot:
    """A slot's process, started when needed, and its GPUs."""

    def __init__(self, conditions: Conditions, gpus: str | None, stopped: Callable[[], bool]) -> None:
        self._conditions = conditions
        self._gpus = gpus
        self._stopped = stopped
        self._child: Child | None = None
        self._serves: tuple[Mapping[str, str], str | None] = ({}, None)  # environment and interpreter of the process
        self.gpu_ids = gpu_release.visible(gpus, stopped) if conditions.device == "cuda" else []
        self._baseline = gpu_release.Baseline(None)

    def unfit(self) -> str | None:
        """Reason why no point may be measured here: a GPU that the run is not planned for; None if there is none."""
        planned = self._conditions.card
        for gpu in self.gpu_ids if planned else []:
            card = gpu_release.card_name(gpu, self._stopped)
            if card not in (planned, None):
                node = socket.gethostname()
                fix = "name one type in resources.accelerator_type, or with --local in CUDA_VISIBLE_DEVICES"
                return f"planned for {planned}, node {node} has {card}; {fix}"
        return None

    def serves_another(self, point: Point) -> bool:
        """Whether the process has another environment or interpreter than the point's."""
        return self._child is not None and self._serves != (point.env, point.python)

    def child(self, point: Point) -> Child:
        """A living process for a point: the warm one, else a new one. Raises OSError if it cannot be started."""
        if self._child is not None and not self._child.alive():
            self.clear()
        if self._child is None:
            self._baseline = gpu_release.Baseline.take(self.gpu_ids, self._stopped)
            env = {**_variables(self._conditions.threads, self._gpus), **point.env}
            self._child = Child(_ANSWER, env=env, python=point.python)
            self._serves = (point.env, point.python)
        return self._child

    def clear(self) -> str | None:
        """End the process and wait until its GPUs are free. Returns the obstacle if they do not get free, else None."""
        if self._child is None:
            return None
        child, self._child = self._child, None
        pids = {process.pid for process in child.tree()} | {child.pid}
        child.discard()
        return self._baseline.wait_free(pids, self._stopped)


def _variables(threads: int, gpus: str | None) -> dict[str, str]:
    """Environment variables of a point's process: threads of its numerical libraries, and its GPUs."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # NVML's order, so that telemetry samples the process's GPU.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    }
    return variables if gpus is None else {**variables, "CUDA_VISIBLE_DEVICES": gpus}


class _Attempt:
    """One attempt at one point.

    Attributes:
        files: of its end, to be kept.
    """

    def __init__(
        self,
        child: Child,
        assignment: Assignment,
        conditions: Conditions,
        gpu_ids: Sequence[str],
        cluster: Cluster | None,
        keeping: Keeping,
    ) -> None:
        self.files: list[Source] = []
        self._child = child
        self._assignment = assignment
        self._conditions = conditions
        self._cluster = cluster
        self._keeping = keeping
        self._telemetry = Telemetry(gpu_ids)
        here = not gpu_ids and cluster is None  # ranks on a cluster are sampled there
        self._live = LiveSeries(assignment, PointUsage(child.tree, conditions.threads) if here else self._telemetry)
        self._pace = Pace()
        self._progress: Progress | None = None  # the latest, if it was not sent
        self._filter = BeatFilter(_PROGRESS_INTERVAL_S)
        self._environment: dict[str, Any] = {}
        self._started_at = now()
        deadlines = conditions.deadlines
        self._watch = DeadlineWatch(child, Limits(deadlines.startup_s, deadlines.heartbeat_s, deadlines.point_s))

    def follow(self, stopped: Callable[[], bool]) -> Generator[Update, None, OutcomeRecord | None]:
        """Follow the point to its end. Returns None if stopped before: then the point has had its grace."""
        ended: Ended | None = None
        self._telemetry.start()
        try:
            self._child.send(self._command())
            while ended is None:
                events, ended = self._watch.step()
                for event in events:
                    yield from self._take(event)
                if self._progress is not None and self._filter.passes(self._progress.phase):
                    yield self._progress
                    self._progress = None
                yield from self._keeping.records()
                if (piece := self._live.due()) is not None:
                    yield piece
                if ended is None and stopped():
                    return None
        finally:
            if ended is None:
                self._telemetry.ask_to_stop()  # its samples are not needed, and a wedged driver would hold it up
                self._ask_to_end()
        assert ended is not None
        outcome = self._end(ended)
        sampled = self._telemetry.stop()
        if (piece := self._live.rest()) is not None:
            yield piece
        return (
            outcome if self._cluster or self._conditions.device != "cuda" else self._with_gpu_metrics(outcome, sampled)
        )

    def _command(self) -> MeasurePoint:
        assignment, point, conditions = self._assignment, self._assignment.point, self._conditions
        checkpoints = cluster = None
        if conditions.store is not None:  # beside the folders of its attempts
            checkpoints = f"{conditions.store}/{checkpoints_path(assignment.run_id, assignment.point_id)}"
        if self._cluster is not None:
            threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, int(self._cluster.cpus))))
            env_vars = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **threads, **point.env}
            cluster = replace(self._cluster, card=conditions.card, env_vars=env_vars)
        return MeasurePoint(
            kind=point.kind,
            config=dict(point.config),
            device=conditions.device,
            memory_bytes=conditions.memory_bytes,
            settings=conditions.settings,
            checkpoints=checkpoints,
            key=assignment.key if checkpoints else "",
            cluster=cluster,
        )

    def _take(self, event: object) -> Iterator[Update]:
        match event:
            case Beat(phase, done, total):
                done, total, rate = self._pace.note(phase, done, total)
                run_id, point_id = self._assignment.run_id, self._assignment.point_id
                self._progress = Progress(run_id, point_id, now(), phase, done, total, rate)
            case Samples():
                self._live.take(event)
            case RanksStarted(pids):
                self._live.follow(pids)
            case Note(name, text):
                self._keeping.add([Source(name, text)])
            case Environment(environment):
                self._environment = dict(environment)
            case Warned(text):
                yield _warning(self._assignment, text)

    def _ask_to_end(self) -> None:
        """Let a point that keeps checkpoints save one: SIGTERM, and time for its last word."""
        deadline = time.monotonic() + self._conditions.grace_s
        if not self._conditions.grace_s or not self._child.alive():
            return
        os.kill(self._child.pid, signal.SIGTERM)
        while self._child.alive() and time.monotonic() < deadline:
            if any(isinstance(event, Measured | Failure) for event in self._child.events(POLL_S)):
                return

    def _end(self, ended: Ended) -> OutcomeRecord:
        """The outcome, once a point that passed a deadline was examined and killed."""
        reason, results = ended.reason, {}
        if ended.expired:
            files = post_mortem.snapshot(self._child.tree())
            self.files += [Source(name, text) for name, text in files.items()]
            if self._cluster is not None:
                self.files += self._explanation()
            written = (self._child.temporary / FAILURE_FILES).glob("*.json")
            self.files += [Source(path.name, path) for path in sorted(written)]
            if self._child.kill() is None:
                reason = f"{reason}; the process is stuck in the kernel and did not die of SIGKILL"
        elif isinstance(ended.result, Measured):
            measurement = ended.result.measurement
            self._environment |= measurement.environment
            metrics = tuple(MetricData(**vars(metric)) for metric in measurement.metrics)
            results = {"metrics": metrics, "route": dict(measurement.route)}
        output = [Source(o.name, o.path, o.start, o.stop, o.problem) for o in self._child.new_output()]
        self.files = [*output, *self.files, *_sources(ended.files)]
        return _outcome(
            self._assignment, ended.state, reason, self._started_at, environment=self._environment, **results
        )

    def _explanation(self) -> list[Source]:
        """Files in which the process explains ranks on other nodes."""
        deadline = time.monotonic() + EXPLAIN_S
        self._child.send(Explain())
        while self._child.alive() and time.monotonic() < deadline:
            for event in self._child.events(POLL_S):
                if isinstance(event, Explanation):
                    return _sources(event.files)
        return []

    def _with_gpu_metrics(self, outcome: OutcomeRecord, sampled: TelemetrySummary) -> OutcomeRecord:
        """The outcome with the metrics of the point's GPUs that it lacks, if it is ok; a table of them is a file."""
        self.files.insert(0, Source("telemetry.txt", sampled.text))
        if outcome.state is not PointState.OK:
            return outcome
        names = {metric.name for metric in outcome.metrics}
        added = tuple(MetricData(**vars(metric)) for metric in sampled.metrics if metric.name not in names)
        return outcome.model_copy(update={"metrics": outcome.metrics + added})


def _sources(files: Sequence[File]) -> list[Source]:
    return [Source(file.name, Path(file.path), problem=file.problem) for file in files]


def _not_started(assignment: Assignment, err: OSError) -> OutcomeRecord:
    """End of a point whose process could not be started: lost, so measured again, where the host had no room for it."""
    if err.errno is not None and err.filename is None:  # no folder at all, pipe or process
        reason = f"the host has no room for the point's process ({err.strerror}); make room"
        return _outcome(assignment, PointState.LOST, reason)
    if temporary.POINT in str(err.filename):  # in the process's folder: the host's disk, not the interpreter
        reason = f"TMPDIR: {tempfile.gettempdir()!r}: no room for the point's files there ({err.strerror}); make room"
        return _outcome(assignment, PointState.LOST, reason)
    reason = f"python: {assignment.point.python or sys.executable!r}: cannot be started ({err})"
    return _outcome(assignment, PointState.ERROR, reason)


def _outcome(
    assignment: Assignment, state: PointState, reason: str | None, started_at: Any = None, **results: Any
) -> OutcomeRecord:
    return OutcomeRecord(
        run_id=assignment.run_id,
        point_id=assignment.point_id,
        attempt=assignment.attempt,
        state=state,
        reason=reason,
        started_at=started_at or now(),
        **results,
    )


def _warning(assignment: Assignment, message: str) -> EventRecord:
    """The record of something that does not end the point."""
    return EventRecord(run_id=assignment.run_id, point_id=assignment.point_id, level="warning", message=message)
