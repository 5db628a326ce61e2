"""Hands out points to an executor, records its updates, retries lost points, cancels."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jobs.schema.states import PointState, RunState
from orchestrator.artifact_url import is_local
from orchestrator.errors import ExecutorGone
from orchestrator.execute.supervisor import Assignment, BatchEnded, Conditions, Update
from orchestrator.run.plan import Plan
from orchestrator.run.progress import Watcher
from orchestrator.store import records as rec
from orchestrator.store.journal import Recorder

if TYPE_CHECKING:
    from orchestrator.execute.local import LocalExecutor
    from orchestrator.execute.ray_cluster import RayExecutor

_POLL_S = 0.2


class Scheduler:
    """Measures the points of one run, in some `slots` at a time.

    A lost point is handed out again `retries` times, or `restarts` if that is more, one that crashed `restarts` times.
    """

    def __init__(
        self,
        executor: LocalExecutor | RayExecutor,
        recorder: Recorder,
        watcher: Watcher,
        plan: Plan,
        conditions: Conditions,
        *,
        slots: int,
        retries: int,
        restarts: int = 0,
    ) -> None:
        self._executor, self._recorder, self._watcher = executor, recorder, watcher
        self._plan, self._conditions, self._slots = plan, conditions, slots
        self._again = {PointState.LOST: max(retries, restarts), PointState.CRASH: restarts}
        self._queue = deque(plan.assignments)
        self._batches: dict[int, dict[str, Assignment]] = {}  # unfinished points of each batch, by point id
        self._handed_out = 0
        self._repeated: Counter[tuple[str, PointState]] = Counter()  # point id and the state of its ended attempts
        self._nodes: dict[str, str | None] = {}  # point id -> node of its last start
        self._files: dict[str, str] = {}  # node -> the first file that it kept

    def run(self, stopped: Callable[[], str | None]) -> RunState:
        """Measure all points, or until `stopped` gives a reason to cancel. Records the run's end, too."""
        while self._queue or self._batches:
            if reason := stopped():  # recorded before the processes end: Ray kills a stopped job after a few seconds
                left = self.end(RunState.CANCELLED, PointState.CANCELLED, reason)
                try:
                    self._executor.cancel(self._conditions.grace_s)
                except ExecutorGone as gone:  # the run is cancelled all the same
                    self._watcher.tell(f"warning: its processes may still run: {gone}")
                self._watcher.tell(f"cancelled ({reason}): {left} points not measured")
                return RunState.CANCELLED
            while self._queue and len(self._batches) < self._slots:
                size = 1
                if self._conditions.warm:  # one slot gets all; several get shrinking shares, so that they end together
                    size = math.ceil(len(self._queue) / (1 if self._slots == 1 else 2 * self._slots))
                taken = [self._queue.popleft() for _ in range(size)]
                self._handed_out += 1
                self._batches[self._handed_out] = {a.point_id: a for a in taken}
                self._executor.submit(self._handed_out, taken, self._conditions)
            for batch, update in self._executor.poll(_POLL_S):
                # A signal to the driver may have hit its children, too: a point that fails then is cancelled.
                if not stopped() or (isinstance(update, rec.OutcomeRecord) and update.state is PointState.OK):
                    self._take(batch, update)
            self._recorder.look()
        self._check_visible()
        self.end(RunState.DONE, PointState.LOST, None)
        return RunState.DONE

    def _take(self, batch: int, update: Update | BatchEnded) -> None:
        if isinstance(update, rec.OutcomeRecord):
            self._settle(self._batches[batch].pop(update.point_id), update)
        elif isinstance(update, rec.Progress):
            self._recorder.progress(update)
            self._watcher.progress(update)
        elif not isinstance(update, BatchEnded):
            self._write(update if isinstance(update, tuple) else [update])
        elif left := [*self._batches.pop(batch).values()]:  # the first was running, the others had not begun
            self._queue.extendleft(reversed(left[1:]))
            state, reason = update.state or PointState.LOST, update.reason or "its supervisor ended without an outcome"
            self._settle(left[0], rec.OutcomeRecord(**left[0].ids, state=state, reason=reason))

    def _write(self, records: Sequence[rec.Record]) -> None:
        """Journal records, then show what they report."""
        self._recorder.write(records)
        for record in records:
            match record:
                case rec.StartRecord():
                    self._nodes[record.point_id] = record.node
                    self._watcher.started(record)
                case rec.OutcomeRecord(final=True):
                    self._watcher.ended(record)
                case rec.ArtifactRecord():
                    self._files.setdefault(self._nodes.get(record.point_id) or "another node", record.artifact.path)
                case rec.EventRecord():
                    self._watcher.noted(record)

    def _check_visible(self) -> None:
        """Warn if a node has kept its files in a folder that is not the same one here."""
        store = self._conditions.store or ""
        for node, path in self._files.items() if is_local(store) else ():
            if not os.path.exists(f"{store.removeprefix('file://')}/{path}"):
                fix = "name a store that all nodes reach (NSA_ARTIFACT_STORE)"
                message = f"artifacts of node {node} are not visible here: {fix}"
                self._write([rec.EventRecord(run_id=self._plan.run.run_id, level="warning", message=message)])
                return

    def _settle(self, assignment: Assignment, outcome: rec.OutcomeRecord) -> None:
        """Take an attempt's end for the point's end, or hand the point out again."""
        point_id, state = outcome.point_id, outcome.state
        if self._repeated[point_id, state] < self._again.get(state, 0):
            self._repeated[point_id, state] += 1
            verb = "got lost" if state is PointState.LOST else "crashed"
            event = assignment.warning(f"attempt {outcome.attempt} {verb} ({outcome.reason}); handed out again")
            self._write([outcome.model_copy(update={"final": False}), event])
            self._queue.append(replace(assignment, attempt=assignment.attempt + 1))
            return
        self._write([outcome])
        records, assignments = self._plan.after(assignment.point, outcome)
        self._queue.extend(assignments)
        if records:  # each write is synced
            self._write(records)

    def end(self, run: RunState, point: PointState, reason: str | None) -> int:
        """Record the run's end, and its unfinished points with state `point`. Returns their number."""
        left = [a for batch in self._batches.values() for a in batch.values()] + list(self._queue)
        outcomes = [rec.OutcomeRecord(**a.ids, state=point, reason=reason) for a in left]
        ids = {"run_id": self._plan.run.run_id, "resumed": self._plan.run.resumed}
        self._recorder.write([*outcomes, rec.RunEndRecord(**ids, state=run, reason=reason)])
        self._plan.states.update([point] * len(left))
        return len(left)
