"""Plans a run: all points of a new run, the missing points of a resumed one."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jobs.schema.point import Machine, Point
from jobs.schema.states import PointState
from orchestrator.errors import UserError
from orchestrator.messages import Assignment
from orchestrator.store.records import (
    ArtifactRecord,
    EventRecord,
    OutcomeRecord,
    PointRecord,
    Record,
    RunRecord,
    StartRecord,
    now,
)


class PlanError(UserError):
    """A run that cannot be planned. One line a mistake: field, value, fix."""


@dataclass(frozen=True)
class Plan:
    """The points of a run that will be measured, and those that need no measuring.

    Attributes:
        records: to be journalled at the beginning.
        assignments: the points to measure.
        settled: number of points that need no measuring, by state.
        labels: point id -> label, of all points.
        outlived: number of points to measure whose earlier outcomes count until they have new ones.
    """

    run: RunRecord
    records: list[Record]
    assignments: list[Assignment]
    settled: Counter[PointState]
    labels: dict[str, str]
    outlived: int = 0


@dataclass(frozen=True)
class Remeasured:
    """The latest attempt at a point that had an outcome before: its key, and pending, running, lost or cancelled."""

    key: str
    state: PointState


@dataclass(frozen=True)
class PointHistory:
    """A point's latest state in a run's records; one that is measured again keeps its outcome until it has a new one.

    Attributes:
        attempt: the number of its latest attempt.
        again: that attempt, where key and state are those of an earlier outcome.
    """

    key: str
    label: str
    state: PointState
    attempt: int = 0
    again: Remeasured | None = None

    @property
    def latest(self) -> PointState:
        """State of the latest attempt."""
        return self.again.state if self.again else self.state

    def after(self, record: PointRecord | StartRecord | OutcomeRecord) -> PointHistory:
        """The history with a further record."""
        if isinstance(record, PointRecord):
            attempt = max(self.attempt, record.attempt)  # a rebuilt journal lacks earlier attempts
            if self.state.settles and record.state is PointState.PENDING:
                return replace(self, attempt=attempt, again=Remeasured(record.key, record.state))
            return PointHistory(record.key, record.label, record.state, attempt)
        started = isinstance(record, StartRecord)
        state = PointState.RUNNING if started else record.state
        if self.again and (started or not record.settles):
            return replace(self, attempt=record.attempt, again=replace(self.again, state=state))
        return replace(self, key=(self.again or self).key, state=state, attempt=record.attempt, again=None)


@dataclass
class History:
    """A run's latest state in its records: those of its journal, or of the database.

    Attributes:
        files: paths of the recorded files of its points, relative to the artifact store.
    """

    run: RunRecord
    points: dict[str, PointHistory] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


def new_run_id(name: str) -> str:
    """A new run id; ids sort by time: 20260131-235959-<name>-<4 hex digits>."""
    return f"{now():%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"


def new_plan(run: RunRecord, points: Sequence[Point], machines: Mapping[str | None, Machine]) -> Plan:
    """The plan of a new run. `machines`: the machine as each interpreter of the points finds it."""
    plan = Plan(run, [run], [], Counter(), _labels(run, points))
    for index, point in enumerate(points):
        _add(plan, index, point, point.key(run.code_hash or "", machines[point.python]), attempt=1)
    return plan


def resumed_plan(
    run: RunRecord, points: Sequence[Point], machines: Mapping[str | None, Machine], old: History, *, again: bool
) -> Plan:
    """The plan of a resumed run: points that ended under the same key are not measured again.

    Args:
        machines: the machine as each interpreter of the points finds it.
        again: measure failed points again, too.

    Raises:
        PlanError: the run's points differ from the spec's points on this machine.
    """
    labels = _labels(run, points)
    if not old.points:  # the run ended before its first point was planned
        return new_plan(run, points, machines)
    if labels != {point_id: before.label for point_id, before in old.points.items()}:
        raise PlanError(
            f"--resume: {run.run_id!r}: its points differ from the spec's points on this machine; start a new run"
        )
    plan = Plan(run, [run], [], Counter(), labels)
    changed, interrupted, outlived, elsewhere = 0, 0, 0, False
    for index, (point_id, point) in enumerate(zip(labels, points, strict=True)):
        before, key = old.points[point_id], point.key(run.code_hash or "", machines[point.python])
        if _settled(before, point, again):
            if before.key == key:
                plan.settled[before.state] += 1
                if not before.latest.ended:  # it was planned for sources or a machine that are no more
                    plan.records.append(_not_again(run.run_id, point_id, before))
                continue
            if before.again is not None and before.again.key == key:  # a resume has said why
                interrupted += 1
            else:
                changed += 1
                elsewhere |= before.key != point.key(old.run.code_hash or "", machines[point.python])
        if before.latest is PointState.RUNNING:
            plan.records.append(_lost(run.run_id, point_id, before.attempt))
        outlived += before.state.settles and point.skip_reason is None
        _add(plan, index, point, key, attempt=before.attempt + 1)
    plan = replace(plan, outlived=outlived)
    if changed:
        plan.records.append(EventRecord(run_id=run.run_id, message=_why_again(changed, run, old.run, elsewhere)))
    if interrupted:
        message = f"{_measured_again(interrupted)}: an earlier resume began to, and was interrupted"
        plan.records.append(EventRecord(run_id=run.run_id, message=message))
    if plan.assignments and old.run.artifact_store not in (None, run.artifact_store):
        message = _elsewhere(run, old.run)
        plan.records.append(EventRecord(run_id=run.run_id, level="warning", message=message))
    return plan


def _elsewhere(run: RunRecord, before: RunRecord) -> str:
    """Warning of a run that goes on with another artifact store."""
    return (
        f"NSA_ARTIFACT_STORE: {run.artifact_store}: was {before.artifact_store}; checkpoints that are only there are "
        "not gone on from, and its files not shown; set it as it was, unless they were moved"
    )


def _why_again(points: int, run: RunRecord, before: RunRecord, elsewhere: bool) -> str:
    """Why a resumed run measures points again that had ended; `elsewhere`: not for their code alone."""
    why = []
    if run.code_hash != before.code_hash:
        why.append(
            f"the sources of nsa_core, jobs or the kind's package changed, if only a comment (code_hash "
            f"{before.code_hash} is now {run.code_hash})"
        )
    if elsewhere:
        why.append("the device, its driver, a version or a variable differs from what they were measured with")
    return f"{_measured_again(points)}: {'; and '.join(why)}"


def _measured_again(points: int) -> str:
    return f"{'1 point that had ended is' if points == 1 else f'{points} points that had ended are'} measured again"


def history(records: Iterable[Record]) -> History | None:
    """The history that a run's records, in order, add up to; None if the first is not a RunRecord."""
    begun, *rest = [*records] or [None]
    if not isinstance(begun, RunRecord):
        return None
    found = History(begun)
    for record in rest:
        if isinstance(record, RunRecord):
            found.run = record
        elif isinstance(record, PointRecord):
            new = PointHistory(record.key, record.label, record.state, record.attempt)
            before = found.points.get(record.point_id)
            found.points[record.point_id] = before.after(record) if before else new
        elif isinstance(record, StartRecord | OutcomeRecord) and record.point_id in found.points:
            # Else the line of its plan is lost; the database may have it.
            found.points[record.point_id] = found.points[record.point_id].after(record)
        if isinstance(record, ArtifactRecord):
            found.files.add(record.artifact.path)
        elif isinstance(record, OutcomeRecord):  # of version 0.1.0
            found.files |= {f"{record.run_id}/{file.path}" for file in record.artifacts}
    return found


def _labels(run: RunRecord, points: Sequence[Point]) -> dict[str, str]:
    return {f"{run.run_id}/{index}": point.label for index, point in enumerate(points)}


def nothing_left(old: History, *, again: bool) -> bool:
    """Whether every point of a run has ended so that a resume measures it only if its key has changed.

    Args:
        again: measure failed points again, too.
    """
    good = (PointState.OK, PointState.SKIPPED)
    return bool(old.points) and all(
        point.state in good or _failure_stays(point, again=again) for point in old.points.values()
    )


def _settled(before: PointHistory, point: Point, again: bool) -> bool:
    """Whether a point is not measured again if its key is the same."""
    if before.state is PointState.SKIPPED:
        return point.skip_reason is not None
    return before.state is PointState.OK or _failure_stays(before, again=again)


def _failure_stays(before: PointHistory, *, again: bool) -> bool:
    """Whether a point has failed and no one asked for more, neither now nor in a resume that did not get to it."""
    return before.state.failed and before.state.settles and before.again is None and not again


def _add(plan: Plan, index: int, point: Point, key: str, attempt: int) -> None:
    state = PointState.PENDING if point.skip_reason is None else PointState.SKIPPED
    record = PointRecord(
        run_id=plan.run.run_id,
        point_id=f"{plan.run.run_id}/{index}",
        index=index,
        attempt=attempt - 1,
        key=key,
        label=point.label,
        config=dict(point.config),
        axes=point.axes.to_record(),
        estimate_bytes=point.estimate_bytes,
        state=state,
        reason=point.skip_reason,
        resumed=plan.run.resumed,
    )
    plan.records.append(record)
    if state is PointState.PENDING:
        plan.assignments.append(Assignment(record.run_id, record.point_id, attempt, point, key))
    else:
        plan.settled[state] += 1


def _not_again(run_id: str, point_id: str, before: PointHistory) -> OutcomeRecord:
    """The end of measuring a point again that is not needed any more."""
    attempt = before.attempt + (before.latest is PointState.PENDING)
    reason = "not needed: the point has an outcome with the sources and on the machine of now"
    return OutcomeRecord(run_id=run_id, point_id=point_id, attempt=attempt, state=PointState.CANCELLED, reason=reason)


def _lost(run_id: str, point_id: str, attempt: int) -> OutcomeRecord:
    reason = "the run's driver ended before this attempt did"
    return OutcomeRecord(run_id=run_id, point_id=point_id, attempt=attempt, state=PointState.LOST, reason=reason)
