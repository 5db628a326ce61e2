"""A resumed run says why it measures points again; small shares of a core start few points at a time."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest

from jobs.schema.point import Machine, Point
from jobs.schema.states import PointState
from jobs.specs.load import parse_spec
from orchestrator.execute.room import MOST_A_CORE, Share
from orchestrator.run import plan
from orchestrator.run.plan import History
from orchestrator.run.progress import TerminalWatcher
from orchestrator.store.records import EventRecord, OutcomeRecord, RunRecord, StartRecord

CPU = Machine("cpu", "test processor", 8 * 2**30)
SPEC = {
    "kind": "scaling",
    "name": "t",
    "device": "cpu",
    "implementations": ["chunked"],
    "lengths": [64, 128],
    "shape": {"query_heads": 4, "kv_heads": 2, "head_dim": 16},
}


@pytest.fixture
def points() -> list[Point]:
    return list(parse_spec(SPEC).all_points({None: CPU}))


def run(code_hash: str) -> RunRecord:
    return RunRecord(run_id="r", name="t", kind="scaling", spec=SPEC, spec_hash="0", code_hash=code_hash)


def ended(points: list[Point], code_hash: str) -> History:
    """The history of a run whose points are ok."""
    history = plan.history(plan.new_plan(run(code_hash), points, {None: CPU}).records)
    assert history is not None
    history.points = {
        name: replace(point, state=plan.PointState.OK, attempt=1) for name, point in history.points.items()
    }
    return history


def said(todo: plan.Plan) -> list[str]:
    return [record.message for record in todo.records if isinstance(record, EventRecord)]


def test_changed_sources_are_said_to_be_why_points_are_measured_again(points: list[Point]):
    todo = plan.resumed_plan(run("new"), points, {None: CPU}, ended(points, "old"), again=False)
    assert len(todo.assignments) == len(points)
    (why,) = said(todo)
    assert why.startswith(f"{len(points)} points that had ended are measured again: the sources of nsa_core, jobs")
    assert why.endswith("(code_hash old is now new)")


def test_another_machine_is_said_to_be_why(points: list[Point]):
    there = {None: replace(CPU, name="another processor")}
    todo = plan.resumed_plan(run("same"), points, there, ended(points, "same"), again=False)
    why = "the device, its driver, a version or a variable differs from what they were measured with"
    assert said(todo) == [f"{len(points)} points that had ended are measured again: {why}"]
    todo = plan.resumed_plan(run("new"), points, there, ended(points, "old"), again=False)
    assert said(todo)[0].endswith(f"(code_hash old is now new); and {why}")


def test_nothing_is_said_where_no_point_is_measured_again(points: list[Point]):
    todo = plan.resumed_plan(run("same"), points, {None: CPU}, ended(points, "same"), again=False)
    assert (todo.assignments, said(todo)) == ([], [])


def test_another_artifact_store_is_warned_of_where_points_are_left(points: list[Point]):
    """A training would begin anew there, without its checkpoints."""
    old = ended(points, "same")
    old.run = old.run.model_copy(update={"artifact_store": "file:///a"})
    there = run("same").model_copy(update={"artifact_store": "file:///b"})
    assert said(plan.resumed_plan(there, points, {None: CPU}, old, again=False)) == [], "nothing is left to do"
    name = next(iter(old.points))
    old.points[name] = replace(old.points[name], state=PointState.CANCELLED)
    (warning,) = said(plan.resumed_plan(there, points, {None: CPU}, old, again=False))
    assert warning.startswith("NSA_ARTIFACT_STORE: file:///b: was file:///a; checkpoints that are only there are not")
    assert said(plan.resumed_plan(old.run, points, {None: CPU}, old, again=False)) == []


def test_a_run_that_ended_before_its_first_point_is_resumed(points: list[Point]):
    todo = plan.resumed_plan(run("same"), points, {None: CPU}, History(run("same")), again=False)
    assert len(todo.assignments) == len(points)


def test_a_tiny_share_of_a_core_does_not_start_thousands_of_points():
    node = {"CPU": 2.0}
    assert Share(1, 1e-4, 0, None).points([node]) == 2 * MOST_A_CORE
    assert Share(1, 0.5, 0, None).points([node]) == 4


def test_a_point_that_is_handed_out_again_has_one_bar() -> None:
    with TerminalWatcher({"r/0": "point"}, 0, [], StringIO()) as watching:
        for attempt in (1, 2):
            watching.started(StartRecord(run_id="r", point_id="r/0", attempt=attempt))
        assert len(watching._bars.tasks) == 2  # and the run's
        watching.ended(OutcomeRecord(run_id="r", point_id="r/0", attempt=2, state=PointState.OK))
        assert len(watching._bars.tasks) == 1
