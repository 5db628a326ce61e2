"""Plans: points that follow from others, also in a resumed search; why a resumed run measures points again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from jobs.schema.point import Conclusion, EndedPoint, Machine, Metric, Point
from jobs.schema.quantities import TIME
from jobs.schema.states import PointState
from jobs.specs.load import parse_spec
from jobs.specs.spec import SpecError
from orchestrator.errors import UserError
from orchestrator.execute.supervisor import Assignment
from orchestrator.run import plan
from orchestrator.store.records import (
    EventRecord,
    MetricData,
    OutcomeRecord,
    PointRecord,
    Record,
    RunRecord,
    StartRecord,
)

CPU = {None: Machine("cpu", "test processor", 8 * 2**30)}
RUN = RunRecord(run_id="r", name="t", kind="scaling", spec={"a": 1}, spec_hash="0", code_hash="same")
LAST = 3  # size that no longer fits


def _size(size: int) -> Point:
    return Point("scaling", f"size {size}", {"size": size}, answers=frozenset({PointState.OOM}))


def _further(ended: Sequence[EndedPoint]) -> list[Point]:
    """The next size, until one runs out of memory; then the sum of all times."""
    tried = [each for each in ended if each.point.conclusion is None]
    if all(each.state is PointState.OK for each in tried):
        return [_size(len(tried))]
    total = sum(each.metrics.get("time", 0.0) for each in tried)
    return [Point("scaling", "sum", {"sum": total}, conclusion=Conclusion((Metric.of(TIME, total),), "it is over"))]


def _outcome(assignment: Assignment) -> OutcomeRecord:
    size = assignment.point.config["size"]
    state = PointState.OOM if size == LAST else PointState.OK
    metrics = () if state is PointState.OOM else (MetricData(name="time", unit="ms", value=2.0**size),)
    return OutcomeRecord(
        run_id="r", point_id=assignment.point_id, attempt=assignment.attempt, state=state, metrics=metrics
    )


def _measure(todo: plan.Plan, most: int = 99) -> list[Record]:
    """Journal of a run that measures at most so many points, then is killed while it measures the next."""
    journal, waiting = list(todo.records), list(todo.assignments)
    for _ in range(most):
        if not waiting:
            return journal
        assignment = waiting.pop(0)
        journal.append(StartRecord(run_id="r", point_id=assignment.point_id, attempt=assignment.attempt))
        outcome = _outcome(assignment)
        records, more = todo.after(assignment.point, outcome)
        journal += [outcome, *records]
        waiting += more
    if waiting:
        journal.append(StartRecord(run_id="r", point_id=waiting[0].point_id, attempt=waiting[0].attempt))
    return journal


def _sum(journal: list[Record]) -> float:
    (point_id,) = {each.point_id for each in journal if isinstance(each, PointRecord) and each.label == "sum"}
    *_, outcome = [each for each in journal if isinstance(each, OutcomeRecord) and each.point_id == point_id]
    assert outcome.state is PointState.OK
    return outcome.metrics[0].value


def test_points_follow_from_others_until_a_conclusion_that_is_not_measured() -> None:
    todo = plan.Plan(RUN, [_size(0)], CPU, _further)
    journal = _measure(todo)
    assert todo.labels == {"r/0": "size 0", "r/1": "size 1", "r/2": "size 2", "r/3": "size 3", "r/4": "sum"}
    assert _sum(journal) == 1 + 2 + 4
    assert "it is over" in [getattr(each, "message", "") for each in journal]
    assert todo.failures == 0


def test_a_conclusion_is_of_the_card_that_it_concludes_from() -> None:
    card = {None: Machine("cuda", "NVIDIA H200", 2**37)}
    *_, conclusion = (
        each for each in _measure(plan.Plan(RUN, [_size(0)], card, _further)) if isinstance(each, OutcomeRecord)
    )
    assert conclusion.environment == {"gpu": {"name": "NVIDIA H200"}}


@pytest.mark.parametrize("most", range(5))
def test_a_search_goes_on_where_it_was_killed(most: int) -> None:
    journal = _measure(plan.Plan(RUN, [_size(0)], CPU, _further), most)
    old = plan.history(journal)
    assert old is not None
    todo = plan.Plan(RUN, [_size(0)], CPU, _further, old)
    journal += _measure(todo)
    assert _sum(journal) == 1 + 2 + 4
    assert sorted(todo.labels) == ["r/0", "r/1", "r/2", "r/3", "r/4"]
    measured = [each.point_id for each in journal if isinstance(each, OutcomeRecord) and each.state is PointState.OK]
    assert len(measured) == len(set(measured)), "no size is measured twice"
    assert (todo.failures, todo.states.total()) == (0, 5), "the conclusion, too"


def test_points_whose_sources_are_as_before_again_are_not_measured() -> None:
    journal = _measure(plan.Plan(RUN, [_size(0)], CPU, _further))
    for code_hash in ("changed", "same"):
        run, old = RUN.model_copy(update={"code_hash": code_hash}), plan.history(journal)
        assert old is not None
        todo = plan.Plan(run, [_size(0)], CPU, _further, old)
        journal += todo.records  # interrupted before its first point ended
    assert todo.assignments == []
    [end] = [each for each in todo.records if isinstance(each, OutcomeRecord)]
    assert (end.point_id, end.attempt, end.state) == ("r/0", 2, PointState.CANCELLED)
    assert str(end.reason).startswith("not needed: the point has an outcome with the sources")


def test_other_points_than_the_runs_are_refused() -> None:
    old = plan.history(_measure(plan.Plan(RUN, [_size(0)], CPU, _further)))
    assert old is not None
    for points in ([_size(1)], [_size(number) for number in range(9)]):
        with pytest.raises(UserError, match="its points differ from the spec's points"):
            plan.Plan(RUN, points, CPU, _further, old)


def test_a_label_that_no_point_has_is_refused_beside_one_that_a_point_has() -> None:
    spec = {"kind": "scaling", "name": "t", "device": "cpu", "implementations": ["chunked"]}
    spec |= {"preset": "tiny", "lengths": [64, 128], "passes": ["forward+backward"]}
    there = "chunked forward+backward S=64"
    found = plan.points_of(parse_spec(spec | {"only": [there]}), CPU)
    assert [point.label for point in found] == [there]
    with pytest.raises(SpecError, match=r"^only: 'chunked forward S=64': no point of the spec has this label here"):
        plan.points_of(parse_spec(spec | {"only": [there, "chunked forward S=64"]}), CPU)


def _resumed(then: RunRecord = RUN, now: RunRecord = RUN, machine: Machine = CPU[None]) -> plan.Plan:
    """The plan of a run of two points that were ok, resumed."""
    points = [_size(0), _size(1)]
    old = plan.history(plan.Plan(then, points, CPU).records)
    assert old is not None
    for point in old.points.values():
        point.attempts[1].state, point.attempts[1].settled = PointState.OK, True
    return plan.Plan(now, points, {None: machine}, old=old)


def _events(todo: plan.Plan) -> list[str]:
    return [record.message for record in todo.records if isinstance(record, EventRecord)]


def test_a_resumed_run_says_why_points_are_measured_again() -> None:
    """Nothing, where none is."""
    assert (_resumed().assignments, _events(_resumed())) == ([], [])
    changed = RUN.model_copy(update={"code_hash": "new"})
    todo = _resumed(now=changed)
    assert len(todo.assignments) == 2
    (why,) = _events(todo)
    assert why.startswith("2 points that had ended are measured again: the sources of nsa_core, jobs")
    assert why.endswith("(code_hash same is now new)")
    there = replace(CPU[None], name="another processor")
    machine = "the device, its driver, a version or a variable differs from what they were measured with"
    assert _events(_resumed(machine=there)) == [f"2 points that had ended are measured again: {machine}"]
