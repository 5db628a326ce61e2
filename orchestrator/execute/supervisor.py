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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobs.hardware.telemetry import ProcessUsage, Telemetry
from jobs.process import messages, post_mortem
from jobs.process.child import POLL_S, Child, DeadlineWatch, Ended
from jobs.process.reporter import BeatFilter
from jobs.schema.files import File
from jobs.schema.point import FAILURE_FILES, Device, Point, Samples
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from orchestrator.execute.artifacts import ArtifactCopies, point_index
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
    slot = _Slot(conditions, gpus, stopped, cluster)
    try:
        for assignment in assignments:
            if stopped():
                return
            yield from slot.measure(assignment)
    finally:
        slot.clear()


class _Slot:
    """A slot's process, started when needed, and its GPUs."""

    def __init__(
        self, conditions: Conditions, gpus: str | None, stopped: Callable[[], bool], cluster: messages.Cluster | None
    ) -> None:
        self.conditions, self.stopped, self.cluster = conditions, stopped, cluster
        self.gpus = Gpus(gpus if conditions.device == "cuda" else "", stopped)
        self._visible = gpus
        self._process: Child | None = None
        self._environment: tuple[Mapping[str, str], str | None] = ({}, None)  # the process's variables and interpreter

    def measure(self, assignment: Assignment) -> Iterator[Update]:
        """Measure a point in the slot's process; without an outcome if it is stopped before."""
        point, conditions = assignment.point, self.conditions
        yield rec.StartRecord(**assignment.ids, node=socket.gethostname())
        failed: dict[str, Any] = {**assignment.ids, "state": PointState.ERROR, "started_at": rec.now()}
        if (problem := self.gpus.misfit(conditions.card)) is not None:
            yield rec.OutcomeRecord(**failed, reason=problem)
            return
        if self._environment != (point.env, point.python) or not (self._process and self._process.alive()):
            yield from map(assignment.warning, self.clear())
        while True:
            used = self._process is not None  # by other points
            if self._process is None:
                self.gpus.note_use()
                env = {**process_variables(conditions.threads, self._visible), **point.env}
                try:
                    self._process = Child(ANSWER, env=env, python=point.python)
                except OSError as err:
                    problem = f"the point's process cannot be started: {point.python or sys.executable!r}: {err}"
                    yield rec.OutcomeRecord(**failed, reason=problem)
                    return
                self._environment = (point.env, point.python)
            with ArtifactCopies(assignment.ids, conditions.store) as copies:
                attempt = _Attempt(self, self._process, assignment, copies)
                outcome = yield from attempt.follow()
                if outcome is None:
                    return
                # Earlier points may have left the process's memory fragmented.
                if not (used and outcome.state is PointState.OOM):
                    yield outcome
                    yield from copies.rest(attempt.files, self.stopped)
                    break
            reason = f"measured again in a fresh process, as a used one ran out of memory: {outcome.reason}"
            yield assignment.warning(reason)
            yield from map(assignment.warning, self.clear())
        if not (conditions.warm and outcome.state is PointState.OK):
            yield from map(assignment.warning, self.clear())

    def clear(self) -> Iterable[str]:
        """End the process and wait until its GPUs are free. Returns the obstacle if they do not get free."""
        if self._process is None:
            return ()
        child, self._process = self._process, None
        pids = {process.pid for process in child.tree()} | {child.pid}
        child.discard()
        return filter(None, [self.gpus.wait_free(pids)])


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

    def __init__(self, slot: _Slot, child: Child, assignment: Assignment, copies: ArtifactCopies) -> None:
        self.files: list[File] = []  # of its end, to be copied to the store
        self._slot, self._child, self._assignment, self._copies = slot, child, assignment, copies
        conditions, gpus = slot.conditions, slot.gpus
        self._telemetry = Telemetry(gpus.ids)
        here = not gpus.ids and slot.cluster is None  # ranks on a cluster are sampled there
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

    def follow(self) -> Generator[Update, None, rec.OutcomeRecord | None]:
        """Follow the point to its end. Returns None if stopped before: then the point has had its grace."""
        ended: Ended | None = None
        grace_s = self._slot.conditions.grace_s
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
                if ended is None and self._slot.stopped():
                    return None
        finally:
            if ended is None:
                self._telemetry.stopping.set()  # its samples are not needed, and a wedged driver would hold it up
                if grace_s and self._child.alive():  # it saves a last checkpoint, and reports it
                    os.kill(self._child.pid, signal.SIGTERM)
                    self._await((messages.Measured, messages.Failure), grace_s)
        assert ended is not None
        outcome = self._end(ended)
        sampled = self._telemetry.stop()
        if piece := self._live.due(ended=True):
            yield piece
        if self._slot.cluster is None and self._slot.conditions.device == "cuda":
            self.files.insert(0, File("telemetry.txt", text=sampled.text))
            if outcome.state is PointState.OK:
                names = {metric.name for metric in outcome.metrics}
                added = tuple(rec.MetricData(**vars(metric)) for metric in sampled.metrics if metric.name not in names)
                outcome = outcome.model_copy(update={"metrics": outcome.metrics + added})
        return outcome

    def _command(self) -> messages.MeasurePoint:
        assignment, point, conditions = self._assignment, self._assignment.point, self._slot.conditions
        checkpoints, cluster = None, self._slot.cluster
        if conditions.store is not None:  # beside the folders of its attempts
            folder = f"{point_index(assignment.point_id):04d}/checkpoints"  # the same for all attempts
            checkpoints = f"{conditions.store}/{assignment.run_id}/{folder}"
        if cluster is not None:
            variables = process_variables(max(1, int(cluster.cpus)), None)
            cluster = replace(cluster, card=conditions.card, env_vars={**variables, **point.env})
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
                self._copies.add([File(name, text=text)])
            case messages.Environment(environment):
                self._environment = dict(environment)
            case messages.Warned(text):
                yield self._assignment.warning(text)

    def _end(self, ended: Ended) -> rec.OutcomeRecord:
        """The outcome, once a point that passed a deadline was examined and killed."""
        reason, results = ended.reason, {}
        files = [*ended.files]
        if ended.state in (PointState.HANG, PointState.TIMEOUT):
            stacks = post_mortem.snapshot(self._child.tree())
            files += [File(name, text=text) for name, text in stacks.items()]
            if self._slot.cluster is not None:  # its process explains ranks on other nodes
                self._child.send(messages.Explain())
                answer = self._await((messages.Explanation,), EXPLAIN_S)
                files += answer.files if isinstance(answer, messages.Explanation) else ()
            written = (self._child.temporary / FAILURE_FILES).glob("*.json")
            files += [File(path.name, str(path)) for path in sorted(written)]
            if self._child.kill() is None:
                reason = f"{reason}; the process is stuck in the kernel and did not die of SIGKILL"
        elif isinstance(ended.result, messages.Measured):
            measurement = ended.result.measurement
            self._environment |= measurement.environment
            metrics = tuple(rec.MetricData(**vars(metric)) for metric in measurement.metrics)
            results = {"metrics": metrics, "route": dict(measurement.route)}
        self.files += (*self._child.new_output(), *files)
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
