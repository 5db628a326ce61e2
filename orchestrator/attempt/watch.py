"""One attempt at one point, from outside its process: its progress, its deadlines, which state its end means."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.schema.point import FAILURE_FILES, NOWHERE, STARTING, WAITING, Measurement, Point, Surroundings
from jobs.schema.states import PointState
from orchestrator.attempt import diagnostics, protocol, ray_watches
from orchestrator.attempt.child import Child, Violation
from orchestrator.attempt.live import LiveSeries, Pace
from orchestrator.execute.artifacts import Source, checkpoints_place
from orchestrator.messages import Assignment, Conditions, Progress
from orchestrator.store.records import EventRecord, MetricData, OutcomeRecord, now

POLL_S = 0.2
_PROGRESS_INTERVAL_S = 1.0
_EXPLAIN_S = ray_watches.EXPLAIN_S + 5.0  # the child asks the ranks' nodes, and writes down what they say


def surroundings(assignment: Assignment, conditions: Conditions) -> Surroundings:
    """Places that a point may use: its checkpoints lie in the artifact store, beside the folders of its attempts."""
    if conditions.store is None:
        return NOWHERE
    place = checkpoints_place(assignment.run_id, assignment.point_id)
    return Surroundings(f"{conditions.store}/{place}", assignment.key)


def rank_variables(point: Point, cluster: protocol.Cluster) -> dict[str, str]:
    """Environment variables of a point's ranks on a cluster: the point's, threads, the order of GPUs."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(max(1, int(cluster.cpus))))
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **threads, **point.env}


@dataclass(frozen=True)
class Ended:
    """End of an attempt, and the files to keep of it."""

    outcome: OutcomeRecord
    files: tuple[Source, ...]


class Watch:
    """One attempt at one point: its events so far, its deadlines, its outcome."""

    def __init__(
        self,
        child: Child,
        assignment: Assignment,
        conditions: Conditions,
        live: LiveSeries,
        cluster: protocol.Cluster | None,
    ) -> None:
        self._child = child
        self._cluster = cluster
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
        self._warnings: list[EventRecord] = []
        self._noted: list[Source] = []
        self._oom_kills = diagnostics.oom_kills()
        self._low_memory = False

    def command(self) -> protocol.Run:
        point, conditions = self._assignment.point, self._conditions
        return protocol.Run(
            point.kind,
            dict(point.config),
            conditions.device,
            conditions.memory_bytes,
            conditions.settings,
            str(self._child.temporary),
            surroundings(self._assignment, conditions),
            self._cluster and replace(self._cluster, env_vars=rank_variables(point, self._cluster)),
        )

    def step(self) -> Ended | None:
        """Handle new events. Returns the outcome, None while the point goes on."""
        alive = self._child.alive()  # asked before reading: events of a child that dies now are still read
        for event in self._child.events(POLL_S if alive else 0):
            match event:
                case protocol.Beat():
                    self._note(event)
                case protocol.Samples():
                    self._live.take(event)
                case protocol.Ranks(pids):
                    self._live.follow(pids)
                case protocol.Warned(text):
                    self._warnings.append(warning(self._assignment, text))
                case protocol.Noted(name, text):
                    self._noted.append(Source(name, text))
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

    def warnings(self) -> Iterator[EventRecord]:
        """Warnings of the measurement that were not sent yet."""
        while self._warnings:
            yield self._warnings.pop(0)

    def noted(self) -> list[Source]:
        """Texts to keep that were not given yet."""
        noted, self._noted = self._noted, []
        return noted

    def ask_to_end(self) -> None:
        """Let a point that keeps checkpoints save one: SIGTERM, and time for its last word."""
        deadline = time.monotonic() + self._conditions.grace_s
        if not self._conditions.grace_s or not self._child.alive():
            return
        os.kill(self._child.pid, signal.SIGTERM)
        while self._child.alive() and time.monotonic() < deadline:
            if any(isinstance(e, protocol.Result | protocol.Failure) for e in self._child.events(POLL_S)):
                return

    def _note(self, beat: protocol.Beat) -> None:
        clock = time.monotonic()
        if self._last_sign is not None and beat.phase == self._phase and beat.phase.startswith(WAITING):
            self._start += clock - self._last_sign  # the point's deadline does not run
        self._last_sign, self._phase = clock, beat.phase
        run_id, point_id = self._assignment.run_id, self._assignment.point_id
        done, total, rate = self._pace.note(beat.phase, beat.done, beat.total)
        self._unsent = Progress(run_id, point_id, now(), beat.phase, done, total, rate)

    def _measured(self, measurement: Measurement, files: Sequence[protocol.File]) -> Ended:
        metrics = tuple(MetricData(**vars(metric)) for metric in measurement.metrics)
        self._environment |= measurement.environment
        return self._ended(PointState.OK, None, _sources(files), metrics=metrics, route=dict(measurement.route))

    def _died(self) -> Ended:
        code = self._child.kill()
        reason = diagnostics.describe_exit(code)
        if code == -9 and (diagnostics.oom_kills() > self._oom_kills or self._low_memory):
            return self._ended(PointState.OOM, f"{reason} by the kernel, which was out of memory")
        return self._ended(PointState.CRASH, reason)

    def _overdue(self) -> Ended | None:
        deadlines, clock = self._conditions.deadlines, time.monotonic()
        silent = clock - (self._start if self._last_sign is None else self._last_sign)
        starts = self._last_sign is None or self._phase == STARTING or self._phase.startswith(WAITING)
        if starts and silent > deadlines.startup_s:
            return self._expired(PointState.HANG, f"no progress within the {deadlines.startup_s:g} s for start-up")
        if not starts and silent > deadlines.heartbeat_s:
            return self._expired(PointState.HANG, f"no progress for {deadlines.heartbeat_s:g} s {self._whereabouts()}")
        if clock - self._start > deadlines.point_s:
            told = self._whereabouts() if self._last_sign is not None else "before its first progress"
            return self._expired(PointState.TIMEOUT, f"not done after {deadlines.point_s:g} s {told}")
        return None

    def _whereabouts(self) -> str:
        return f"(last in phase {self._phase!r})"

    def _expired(self, state: PointState, reason: str) -> Ended:
        tree = self._child.tree()
        files = [Source(name, text) for name, text in diagnostics.snapshot(tree).items()]
        diagnostics.request_stacks(tree)
        if self._cluster is not None:
            files += self._explained()
        files += [Source(path.name, path) for path in sorted((self._child.temporary / FAILURE_FILES).glob("*.json"))]
        if self._child.kill() is None:
            reason += "; the process is stuck in the kernel and did not die of SIGKILL"
        return self._ended(state, reason, files)

    def _explained(self) -> list[Source]:
        """Files in which the child explains ranks on other nodes."""
        deadline = time.monotonic() + _EXPLAIN_S
        self._child.send(protocol.Explain())
        while self._child.alive() and time.monotonic() < deadline:
            for event in self._child.events(POLL_S):
                if isinstance(event, protocol.Explained):
                    return _sources(event.files)
        return []

    def _ended(self, state: PointState, reason: str | None, files: Sequence[Source] = (), **found: Any) -> Ended:
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
        return Ended(outcome, (*self._child.new_output(), *self.noted(), *files))


def _sources(files: Sequence[protocol.File]) -> list[Source]:
    return [Source(file.name, Path(file.path), problem=file.problem) for file in files]


def warning(assignment: Assignment, message: str) -> EventRecord:
    """The record of something that does not end the point."""
    return EventRecord(run_id=assignment.run_id, point_id=assignment.point_id, level="warning", message=message)
