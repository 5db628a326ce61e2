"""Plans a run: all points of a new run, the missing points of a resumed one, of which its journal counts."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jobs.schema.axes import check_values
from jobs.schema.plain_text import shown
from jobs.schema.point import EndedPoint, Machine, Point
from jobs.schema.states import FAILED, Origin, PointState
from jobs.specs.kinds import axes_of, kind_module
from jobs.specs.spec import JobSpec, SpecError
from orchestrator import provenance
from orchestrator.errors import UserError
from orchestrator.execute.supervisor import Assignment
from orchestrator.provenance import GitState
from orchestrator.settings import Settings
from orchestrator.store import Store, journal, queries
from orchestrator.store import records as rec
from orchestrator.store.models import Point as PlannedPoint
from orchestrator.store.store import end_attempt, plan_attempt, start_attempt

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
Further = Callable[[Sequence[EndedPoint]], Sequence[Point]]  # points that follow from those that have ended


class Plan:
    """The points of a run: those to measure, and those that need no measuring.

    A search's points are not known in advance: `after` plans what follows from a point's end. Of a resumed run, points
    that ended under the same key are not measured again.

    Args:
        machines: the machine as each interpreter of the points finds it.
        old: what a resumed run has.
        again: measure failed points, too.

    Raises UserError if a resumed run's points differ from the spec's.
    """

    def __init__(
        self,
        run: rec.RunRecord,
        points: Sequence[Point],
        machines: Mapping[str | None, Machine],
        further: Further = lambda ended: (),
        old: History | None = None,
        *,
        again: bool = False,
    ) -> None:
        old = old or History(run)
        labels = [old.points[f"{run.run_id}/{index}"].label for index in range(min(len(points), len(old.points)))]
        if old.points and labels != [point.label for point in points]:  # without any it ended before the first
            raise UserError(
                f"--resume: {run.run_id!r}: its points differ from the spec's points on this machine; start a new run"
            )
        self.run = run
        self.records: list[rec.Record] = [run]  # to be journalled at the beginning
        self.assignments: list[Assignment] = []
        self.states: Counter[PointState] = Counter()  # of points that have ended, or need no measuring
        self.labels: dict[str, str] = {}  # point id -> label, of all points
        self.failures = 0  # of these, those that failed; a failure that answers a search is none
        self.broken = False  # whether the kind's search failed
        self._machines, self._further, self._old, self._again = machines, further, old, again
        self._ids = {point.label: point_id for point_id, point in old.points.items()}
        self._ended: list[EndedPoint] = []
        self._changed = 0  # points that had ended and are measured again
        self._add(points)
        self._explain()

    def _add(self, points: Sequence[Point]) -> None:
        """Plan points, and what follows from those that have ended."""
        while points:
            for point in points:
                self._add_one(point)
            points = self._following()

    def _following(self) -> Sequence[Point]:
        """Points that follow from those that have ended and are not planned yet."""
        planned = {*self.labels.values()}
        try:
            further = self._further(self._ended) if self._ended else ()
            return [point for point in further if point.label not in planned]
        except Exception as err:  # a bug of the kind's `next_points`, which costs no point that is planned
            self.broken = True
            self._further = lambda ended: ()
            problem = f"its next_points failed, and no further points are measured: {type(err).__name__}: {err}"
            message = f"kind: {self.run.kind!r}: {problem}; mend it, then continue with --resume {self.run.run_id}"
            self.records.append(rec.EventRecord(run_id=self.run.run_id, level="error", message=message))
            return ()

    def after(self, point: Point, outcome: rec.OutcomeRecord) -> tuple[list[rec.Record], list[Assignment]]:
        """Records and assignments of the points that follow from a point's end."""
        self._settle(point, outcome.state, outcome.reason, {each.name: each.value for each in outcome.metrics})
        records, assignments = len(self.records), len(self.assignments)
        self._add(self._following())
        return self.records[records:], self.assignments[assignments:]

    def _add_one(self, point: Point) -> None:
        run = self.run
        point_id = self._ids.get(point.label) or f"{run.run_id}/{max(len(self.labels), len(self._ids))}"
        self._ids[point.label] = point_id
        self.labels[point_id] = point.label
        key = point.key(run.code_hash or "", self._machines[point.python])
        before = self._old.points.get(point_id)
        if before is None:
            self._begin(point_id, point, key, attempt=1)
            return
        counting, newest = before.attempts[before.attempt], before.attempts[max(before.attempts)]
        settled = counting.state is PointState.OK or (
            counting.state is PointState.SKIPPED and point.skip_reason is not None
        )
        if not self._again and newest is counting:  # not asked for again, by this resume or an interrupted one
            settled |= counting.state in FAILED and counting.state.settles
        ended: dict[str, Any] = {"run_id": run.run_id, "point_id": point_id, "attempt": newest.number}
        if settled:
            if counting.key == key:
                self._settle(point, counting.state, counting.reason, self._old.metrics.get(point_id, {}))
                if not newest.state.ended:  # planned for other sources or another machine
                    reason = "not needed: the point has an outcome with the sources and the machine as they are"
                    self.records.append(rec.OutcomeRecord(**ended, state=PointState.CANCELLED, reason=reason))
                return
            self._changed += newest is counting or newest.key != key  # else reported before
        if newest.state is PointState.RUNNING:
            reason = "the run's driver ended before this attempt did"
            self.records.append(rec.OutcomeRecord(**ended, state=PointState.LOST, reason=reason))
        self._begin(point_id, point, key, attempt=newest.number + (newest.state is not PointState.PENDING))

    def _settle(self, point: Point, state: PointState, reason: str | None, metrics: Mapping[str, float]) -> None:
        self.states[state] += 1
        self.failures += state not in (PointState.OK, PointState.SKIPPED, *point.answers)
        if state is not PointState.SKIPPED:
            self._ended.append(EndedPoint(point, state, reason, metrics))

    def _begin(self, point_id: str, point: Point, key: str, attempt: int) -> None:
        """Record a point as planned, and what becomes of it: to be measured, skipped, or concluded."""
        ids: dict[str, Any] = {"run_id": self.run.run_id, "point_id": point_id}
        state = PointState.PENDING if point.skip_reason is None else PointState.SKIPPED
        self.records.append(
            rec.PointRecord(
                **ids,
                index=int(point_id.rpartition("/")[2]),
                attempt=attempt - 1,
                key=key,
                label=point.label,
                config=dict(point.config),
                axes=point.axes.to_record(),
                estimate_bytes=point.estimate_bytes,
                state=state,
                reason=point.skip_reason,
                answers=tuple(sorted(point.answers)),
                resumed=self.run.resumed,
            )
        )
        if state is PointState.SKIPPED:
            self._settle(point, state, point.skip_reason, {})
        elif (conclusion := point.conclusion) is not None:
            metrics = tuple(rec.MetricData(**asdict(metric)) for metric in conclusion.metrics)
            machine = self._machines[point.python]  # whose figures it concludes from: rules ask for the card
            card = {"gpu": {"name": machine.name}} if machine.device == "cuda" else {}
            self.records.append(
                rec.OutcomeRecord(**ids, attempt=attempt, state=PointState.OK, metrics=metrics, environment=card)
            )
            if conclusion.warning:
                self.records.append(rec.EventRecord(**ids, level="warning", message=conclusion.warning))
            self._settle(point, PointState.OK, None, {metric.name: metric.value for metric in metrics})
        else:
            self.assignments.append(Assignment(self.run.run_id, point_id, attempt, point, key))

    def _explain(self) -> None:
        """Record why a resumed run measures points again that had ended."""
        run, old, count = self.run, self._old.run, self._changed
        if count:
            points = "1 point that had ended is" if count == 1 else f"{count} points that had ended are"
            reason = "the device, its driver, a version or a variable differs from what they were measured with"
            if run.code_hash != old.code_hash:
                reason = "the sources of nsa_core, jobs or the kind's package changed, if only a comment (code_hash "
                reason += f"{old.code_hash} is now {run.code_hash})"
            self.records.append(rec.EventRecord(run_id=run.run_id, message=f"{points} measured again: {reason}"))
        if self.assignments and old.artifact_store not in (None, run.artifact_store):
            message = (
                f"NSA_ARTIFACT_STORE: {run.artifact_store}: was {old.artifact_store}; checkpoints that are only there "
                "are not gone on from, and its files not shown; set it as it was, unless they were moved"
            )
            self.records.append(rec.EventRecord(run_id=run.run_id, level="warning", message=message))


@dataclass
class History:
    """A run's latest state in its records: those of its journal, or of the database, by whose rules they add up."""

    run: rec.RunRecord
    points: dict[str, PlannedPoint] = field(default_factory=dict)  # with their attempts, by id
    metrics: dict[str, Mapping[str, float]] = field(default_factory=dict)  # of the outcomes that count, by point id


def points_of(
    spec: JobSpec, machines: Mapping[str | None, Machine], ended: Sequence[EndedPoint] | None = None
) -> list[Point]:
    """The points of a spec, or those that follow from others. Raises SpecError if one has axes that its kind did not
    declare so, or `only` names one that there is not."""
    declared = axes_of(kind_module(spec.kind))
    points = [point for point in spec.all_points(machines, ended) if not spec.only or point.label in spec.only]
    follow = points and type(spec).next_points is not JobSpec.next_points  # labels not known yet
    if ended is None and not follow and (unknown := {*spec.only} - {point.label for point in points}):
        problem = "no point of the spec has this label here, or it follows from others; --dry-run lists them"
        raise SpecError(f"only: {shown(min(unknown))}: {problem}")
    try:
        for point in points:
            check_values(point.axes, declared)
    except ValueError as err:
        raise SpecError(f"kind: {spec.kind!r}: {err}") from None
    return points


def new_run_id(name: str) -> str:
    """A new run id; ids sort by time: 20260131-235959-<name>-<4 hex digits>."""
    return f"{rec.now():%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"


def run_record(run_id: str, name: str, kind: str, settings: Settings, git: GitState, **more: Any) -> rec.RunRecord:
    """The record of a run that begins here and now, with `more` fields."""
    return rec.RunRecord(
        run_id=run_id,
        name=name,
        kind=kind,
        git_commit=git.commit,
        git_branch=git.branch,
        git_dirty=git.dirty,
        submission_id=provenance.submission_id(),
        person=settings.person or provenance.user(),
        host=socket.gethostname(),
        artifacts=str(settings.artifacts_dir / run_id),
        artifact_store=settings.artifact_store_url,
        **more,
    )


def history(records: Iterable[rec.Record]) -> History | None:
    """The history that a run's records, in order, add up to; None if the first is not a RunRecord."""
    begun, *rest = [*records] or [None]
    if not isinstance(begun, rec.RunRecord):
        return None
    found = History(begun)
    for record in rest:
        if isinstance(record, rec.RunRecord):
            found.run = record
        elif isinstance(record, rec.PointRecord):
            plan_attempt(found.points.setdefault(record.point_id, PlannedPoint(id=record.point_id)), record, None)
        elif isinstance(record, rec.StartRecord | rec.OutcomeRecord) and (point := found.points.get(record.point_id)):
            # Else the line of its plan is lost; the database may have it.
            if isinstance(record, rec.StartRecord):
                start_attempt(point, record)
            elif end_attempt(point, record) and point.attempt == record.attempt:
                found.metrics[record.point_id] = {metric.name: metric.value for metric in record.metrics}
    return found


def begun(run_id: str, artifacts: Path) -> rec.RunRecord:
    """The latest beginning of a run, from its journal in a folder of runs.

    Raises UserError: it has no journal there, or was not measured here; JournalError: the journal is damaged.
    """
    path = artifacts / run_id / journal.NAME
    if not _RUN_ID.fullmatch(run_id) or not os.path.isfile(path):  # Path.is_file raises for a long name
        latest = sorted(entry.parent.name for entry in artifacts.glob(f"*/{journal.NAME}"))[-3:]
        known = f"the latest there are {', '.join(latest)}" if latest else "there is none yet"
        raise UserError(
            f"--resume: {run_id!r}: no journal of this run in {artifacts}; {known}; if the database has the run, "
            f"restore its journal first: nsa export {run_id} --journal"
        )
    run = in_journal(path).run
    if run.origin is not Origin.MEASURED:
        raise UserError(f"--resume: {run_id!r}: was reported by others, not measured; name a run that was")
    if not run.spec:
        raise UserError(f"--resume: {run_id!r}: its order was refused, it has nothing to go on with; submit a new run")
    return run


def in_journal(path: Path) -> History:
    """The history of a run in its journal. Raises UserError: it ends before the run began; JournalError."""
    found = history(journal.read(path))
    if found is None:
        raise UserError(f"--resume: {path.parent.name!r}: its journal ends before the run began; start a new run")
    return found


def check_complete(store: Store, old: History) -> None:
    """Raise UserError if the database has more of a run than its journal: new results would have the numbers of old."""
    run_id = old.run.run_id
    run, attempts = queries.run(store, run_id), queries.attempts(store, run_id)
    resumed = run["resumed"] if run else 0
    begun = {
        (point_id, number)
        for point_id, point in old.points.items()
        for number, attempt in point.attempts.items()
        if attempt.state is not PointState.PENDING
    }
    started = attempts.loc[attempts["started_at"].notna(), ["point_id", "number"]].itertuples(index=False)
    lacking = len({point_id for point_id, number in started if (point_id, number) not in begun})
    if resumed > old.run.resumed or lacking:
        store.end_lease(run_id)
        raise UserError(
            f"--resume: {run_id!r}: its journal is older than what {store.name} has of the run ({resumed} resumptions, "
            f"the journal {old.run.resumed}; newer attempts at {lacking} points); bring the newest journal here, "
            f"or move this one away and write it again from the database: nsa export {run_id} --journal"
        )
