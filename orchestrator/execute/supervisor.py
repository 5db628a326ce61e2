"""The parent's side of one worker slot: its processes, its GPUs, and the points that they measure.

`supervise` gets `Assignment`s under `Conditions` and yields `Update`s: a point's outcome first, then a record for each
of its files, or an event where a file could not be kept. It runs in a thread of the driver or inside a Ray task and
needs neither the driver's disk nor its database: all that it gets and yields can be pickled, and files go from here to
the artifact store.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.hardware.telemetry import ProcessUsage, Telemetry
from jobs.process import messages, post_mortem
from jobs.process.child import POLL_S, Child, DeadlineWatch, Ended
from jobs.process.reporter import BeatFilter
from jobs.schema.point import FAILURE_FILES, Device, Point, Samples
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from orchestrator.execute.artifacts import ArtifactCopies, Source, point_index
from orchestrator.execute.gpu_release import Gpus
from orchestrator.execute.live import LiveSeries, Pace
from orchestrator.store import records as rec

EXPLAIN_S = post_mortem.STACKS_S + 10.0
"""Seconds that a point's process has to explain ranks on other nodes: their stacks, with Ray's way there and back."""

ANSWER = "orchestrator.execute.point:answer"  # answers the commands of a point's process
_PROGRESS_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Assignment:
    """A point to be measured."""

    run_id: str
    point_id: str
    attempt: int  # its number, from 1
    point: Point
    key: str = ""

    @property
    def ids(self) -> dict[str, Any]:
        """Fields of the records of this attempt."""
        return {"run_id": self.run_id, "point_id": self.point_id, "attempt": self.attempt}

    def warning(self, message: str) -> rec.EventRecord:
        """The record of something that does not end the point."""
        return rec.EventRecord(run_id=self.run_id, point_id=self.point_id, level="warning", message=message)


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all points of a run."""

    device: Device  # of the points
    deadlines: Deadlines
    memory_bytes: int | None = None  # limit of a point's memory beyond its start; None: no limit
    threads: int = 1  # of a child's CPU
    warm: bool = False  # one child serves many points, until one is not ok or the next needs another environment
    settings: tuple[str, ...] = ()  # environment variables whose effective values are read back in each child
    card: str | None = None  # name of the GPU that the points are planned for; another one's are not measured
    store: str | None = None  # URL of the artifact store; None: no file is kept
    grace_s: float = 0.0  # that a point has to end by itself when the run is cancelled; 0: it is killed at once


Pieces = tuple[rec.SeriesRecord, ...]
Update = rec.StartRecord | rec.Progress | Pieces | rec.OutcomeRecord | rec.ArtifactRecord | rec.EventRecord


@dataclass(frozen=True)
class BatchEnded:
    """A batch of points will send no more updates."""

    state: PointState | None = None  # None if its supervisor finished, else that of its unfinished point
    reason: str | None = None  # why the supervisor did not finish


def supervise(
    assignments: Sequence[Assignment],
    conditions: Conditions,
    gpus: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
    cluster: messages.Cluster | None = None,
) -> Iterator[Update]:
    """Measure points one after the other in processes of their own and yield what happens.

    Args:
        gpus: the processes' CUDA_VISIBLE_DEVICES; None keeps this process's.
        stopped: polled several times a second; once true, the process is killed and the generator ends at once,
            without an outcome for the current point.
        cluster: where the ranks of the points run; None: on this host.
    """
    slot = _Slot(conditions, gpus, stopped)
    try:
        for assignment in assignments:
            if stopped():
                return
            yield rec.StartRecord(**assignment.ids, node=socket.gethostname())
            if (problem := slot.gpus.misfit(conditions.card)) is not None:
                yield rec.OutcomeRecord(**assignment.ids, state=PointState.ERROR, reason=problem, started_at=rec.now())
                continue
            if slot.environment != (assignment.point.env, assignment.point.python) and (obstacle := slot.clear()):
                yield assignment.warning(obstacle)
            outcome = yield from _measured(slot, assignment, conditions, cluster, stopped, again=True)
            if outcome is None:
                return
            if not (conditions.warm and outcome.state is PointState.OK) and (obstacle := slot.clear()):
                yield assignment.warning(obstacle)
    finally:
        slot.clear()


def _measured(
    slot: _Slot,
    assignment: Assignment,
    conditions: Conditions,
    cluster: messages.Cluster | None,
    stopped: Callable[[], bool],
    *,
    again: bool,
) -> Generator[Update, None, rec.OutcomeRecord | None]:
    """Measure a point in the slot's process; returns its outcome, None if stopped before."""
    used = slot.process is not None and slot.process.alive()  # by other points
    try:
        child = slot.child(assignment.point)
    except OSError as err:
        reason = f"the point's process cannot be started: {assignment.point.python or sys.executable!r}: {err}"
        outcome = rec.OutcomeRecord(**assignment.ids, state=PointState.ERROR, reason=reason, started_at=rec.now())
        yield outcome
        return outcome
    with ArtifactCopies(assignment.ids, conditions.store) as copies:
        attempt = _Attempt(child, assignment, conditions, slot.gpus, cluster, copies)
        outcome = yield from attempt.follow(stopped)
        if outcome is None:
            return None
        # Earlier points may have left the process's memory fragmented.
        if not (again and used and outcome.state is PointState.OOM):
            yield outcome
            yield from copies.rest(attempt.files, stopped)
            return outcome
    yield assignment.warning(f"measured again in a fresh process, as a used one ran out of memory: {outcome.reason}")
    if obstacle := slot.clear():
        yield assignment.warning(obstacle)
    return (yield from _measured(slot, assignment, conditions, cluster, stopped, again=False))


class _Slot:
    """A slot's process, started when needed, and its GPUs."""

    def __init__(self, conditions: Conditions, gpus: str | None, stopped: Callable[[], bool]) -> None:
        self._conditions, self._visible = conditions, gpus
        self.process: Child | None = None
        self.environment: tuple[Mapping[str, str], str | None] = ({}, None)  # the process's variables and interpreter
        self.gpus = Gpus(gpus if conditions.device == "cuda" else "", stopped)

    def child(self, point: Point) -> Child:
        """A living process for a point: the warm one, else a new one. Raises OSError if it cannot be started."""
        if self.process is not None and not self.process.alive():
            self.clear()
        if self.process is None:
            self.gpus.note_use()
            env = {**process_variables(self._conditions.threads, self._visible), **point.env}
            self.process = Child(ANSWER, env=env, python=point.python)
            self.environment = (point.env, point.python)
        return self.process

    def clear(self) -> str | None:
        """End the process and wait until its GPUs are free. Returns the obstacle if they do not get free, else None."""
        if self.process is None:
            return None
        child, self.process = self.process, None
        pids = {process.pid for process in child.tree()} | {child.pid}
        child.discard()
        return self.gpus.wait_free(pids)


def process_variables(threads: int, gpus: str | None) -> dict[str, str]:
    """Environment variables of a point's process: threads of its numerical libraries, and its GPUs."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's, so that telemetry samples the process's GPU
    }
    return variables if gpus is None else {**variables, "CUDA_VISIBLE_DEVICES": gpus}


class _Attempt:
    """One attempt at one point."""

    def __init__(
        self,
        child: Child,
        assignment: Assignment,
        conditions: Conditions,
        gpus: Gpus,
        cluster: messages.Cluster | None,
        copies: ArtifactCopies,
    ) -> None:
        self.files: list[Source] = []  # of its end, to be copied to the store
        self._child, self._cluster, self._copies = child, cluster, copies
        self._assignment, self._conditions = assignment, conditions
        self._telemetry = Telemetry(gpus.ids)
        here = not gpus.ids and cluster is None  # ranks on a cluster are sampled there
        self._live = LiveSeries(
            assignment.ids, ProcessUsage([child.pid], conditions.threads) if here else self._telemetry
        )
        self._pace = Pace()
        self._filter = BeatFilter(_PROGRESS_INTERVAL_S)
        # Until the process describes itself: one that dies in its start names its card, too.
        self._environment: dict[str, Any] = {"host": socket.gethostname(), "gpu": gpus.cards[0]} if gpus.cards else {}
        self._started_at = rec.now()
        deadlines = conditions.deadlines
        self._watch = DeadlineWatch(child, deadlines.startup_s, deadlines.heartbeat_s, deadlines.point_s)

    def follow(self, stopped: Callable[[], bool]) -> Generator[Update, None, rec.OutcomeRecord | None]:
        """Follow the point to its end. Returns None if stopped before: then the point has had its grace."""
        ended: Ended | None = None
        self._telemetry.start()
        try:
            self._child.send(self._command())
            while ended is None:
                events, ended = self._watch.step()
                for event in events:
                    yield from self._take(event)
                yield from self._copies.records()
                if piece := self._live.due():
                    yield piece
                if ended is None and stopped():
                    return None
        finally:
            if ended is None:
                self._telemetry.stopping.set()  # its samples are not needed, and a wedged driver would hold it up
                if self._conditions.grace_s and self._child.alive():  # it saves a last checkpoint, and reports it
                    os.kill(self._child.pid, signal.SIGTERM)
                    self._await((messages.Measured, messages.Failure), self._conditions.grace_s)
        assert ended is not None
        outcome = self._end(ended)
        sampled = self._telemetry.stop()
        if piece := self._live.due(ended=True):
            yield piece
        if self._cluster is None and self._conditions.device == "cuda":
            self.files.insert(0, Source("telemetry.txt", sampled.text))
            if outcome.state is PointState.OK:
                names = {metric.name for metric in outcome.metrics}
                added = tuple(rec.MetricData(**vars(metric)) for metric in sampled.metrics if metric.name not in names)
                outcome = outcome.model_copy(update={"metrics": outcome.metrics + added})
        return outcome

    def _command(self) -> messages.MeasurePoint:
        assignment, point, conditions = self._assignment, self._assignment.point, self._conditions
        checkpoints = cluster = None
        if conditions.store is not None:  # beside the folders of its attempts
            folder = f"{point_index(assignment.point_id):04d}/checkpoints"  # the same for all attempts
            checkpoints = f"{conditions.store}/{assignment.run_id}/{folder}"
        if self._cluster is not None:
            variables = process_variables(max(1, int(self._cluster.cpus)), None)
            cluster = replace(self._cluster, card=conditions.card, env_vars={**variables, **point.env})
        return messages.MeasurePoint(
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
            case messages.Beat(phase, done, total):
                done, total, rate = self._pace.note(phase, done, total)
                if self._filter.passes(phase):
                    of = self._assignment
                    yield rec.Progress(of.run_id, of.point_id, rec.now(), phase, done, total, rate)
            case Samples():
                self._live.take(event)
            case messages.RanksStarted(pids):
                self._live.follow(pids)
            case messages.Note(name, text):
                self._copies.add([Source(name, text)])
            case messages.Environment(environment):
                self._environment = dict(environment)
            case messages.Warned(text):
                yield self._assignment.warning(text)

    def _end(self, ended: Ended) -> rec.OutcomeRecord:
        """The outcome, once a point that passed a deadline was examined and killed."""
        reason, results = ended.reason, {}
        files: list[messages.File | Source] = [*ended.files]
        if ended.state in (PointState.HANG, PointState.TIMEOUT):
            files += [Source(name, text) for name, text in post_mortem.snapshot(self._child.tree()).items()]
            if self._cluster is not None:  # its process explains ranks on other nodes
                self._child.send(messages.Explain())
                answer = self._await((messages.Explanation,), EXPLAIN_S)
                files += answer.files if isinstance(answer, messages.Explanation) else ()
            written = (self._child.temporary / FAILURE_FILES).glob("*.json")
            files += [Source(path.name, path) for path in sorted(written)]
            if self._child.kill() is None:
                reason = f"{reason}; the process is stuck in the kernel and did not die of SIGKILL"
        elif isinstance(ended.result, messages.Measured):
            measurement = ended.result.measurement
            self._environment |= measurement.environment
            metrics = tuple(rec.MetricData(**vars(metric)) for metric in measurement.metrics)
            results = {"metrics": metrics, "route": dict(measurement.route)}
        for file in (*self._child.new_output(), *files):
            if isinstance(file, messages.File):
                file = Source(file.name, Path(file.path), file.start, file.stop, file.problem)
            self.files.append(file)
        measured = {"environment": self._environment, "started_at": self._started_at, **results}
        return rec.OutcomeRecord(**self._assignment.ids, state=ended.state, reason=reason, **measured)

    def _await(self, types: tuple[type, ...], seconds: float) -> object:
        """The next message of the child of one of these types; None if it ends or is silent for so long."""
        deadline = time.monotonic() + seconds
        while self._child.alive() and time.monotonic() < deadline:
            for event in self._child.inbox.receive(POLL_S):
                if isinstance(event, types):
                    return event
        return None
