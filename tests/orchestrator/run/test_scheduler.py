"""The scheduler with a scripted executor: retries, batches, cancellation."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobs.schema.point import Point
from jobs.schema.states import PointState, RunState
from jobs.specs.spec import Deadlines
from orchestrator.errors import ExecutorGone
from orchestrator.execute.artifacts import ArtifactStore
from orchestrator.messages import Assignment, BatchEnded, Conditions
from orchestrator.run.recorder import Recorder
from orchestrator.run.scheduler import Scheduler
from orchestrator.store import journal
from orchestrator.store.journal import Journal
from orchestrator.store.records import (
    ArtifactData,
    ArtifactRecord,
    EventRecord,
    OutcomeRecord,
    RunEndRecord,
    StartRecord,
)

LOST = BatchEnded(PointState.LOST, "the node went away")


class Script:
    """An executor that ends each point's attempts as scripted: with a state, with LOST or not at all ("silent")."""

    def __init__(self, fates: dict[str, list] | None = None) -> None:
        self.fates = fates or {}
        self.batches: list[list[str]] = []
        self.most_at_a_time = 0
        self.cancelled = False
        self._updates: deque = deque()
        self._running: set[int] = set()

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        self.batches.append([a.point_id for a in assignments])
        self._running.add(batch)
        self.most_at_a_time = max(self.most_at_a_time, len(self._running))
        for a in assignments:
            fate = self.fates.get(a.point_id, [PointState.OK]).pop(0)
            self._updates.append(
                (batch, StartRecord(run_id="r", point_id=a.point_id, attempt=a.attempt, node="bench7"))
            )
            if isinstance(fate, BatchEnded):
                self._updates.append((batch, fate))
                return
            if fate == "silent":
                return
            about = {"run_id": "r", "point_id": a.point_id, "attempt": a.attempt}
            self._updates.append((batch, OutcomeRecord.model_validate({**about, "state": fate})))
            file = ArtifactData(name="stdout.txt", path=f"r/0000/{a.attempt}/stdout.txt", size=0, sha256="")
            self._updates.append((batch, ArtifactRecord.model_validate({**about, "artifact": file})))
        self._updates.append((batch, BatchEnded()))

    def poll(self, timeout: float) -> list:
        if not self._updates:
            return []
        batch, update = self._updates.popleft()
        if isinstance(update, BatchEnded):
            self._running.discard(batch)
        return [(batch, update)]

    def cancel(self) -> None:
        self.cancelled = True


class Silent:
    """Shows nothing."""

    def started(self, record: object) -> None: ...
    def progress(self, sign: object) -> None: ...
    def ended(self, outcome: object) -> None: ...
    def noted(self, event: object) -> None: ...
    def tell(self, message: str) -> None: ...


@pytest.fixture
def run(tmp_path: Path):
    def run(
        executor: Script, count: int, *, warm=False, slots=1, retries=1, restarts=0, stopped=lambda: None, store=None
    ):
        path = tmp_path / journal.NAME
        conditions = Conditions("cpu", Deadlines(), warm=warm, store=store)
        with Journal(path) as book:
            recorder = Recorder("r", book, None, print)
            often = {"slots": slots, "retries": retries, "restarts": restarts}
            scheduler = Scheduler(executor, recorder, Silent(), conditions, **often)  # type: ignore[arg-type]
            state = scheduler.run(
                "r", [Assignment("r", f"r/{i}", 1, Point("k", f"p{i}", {})) for i in range(count)], stopped
            )
        return state, scheduler.states, list(journal.read(path))

    return run


def outcomes(records) -> list[tuple[str, int, PointState]]:
    return [(r.point_id, r.attempt, r.state) for r in records if isinstance(r, OutcomeRecord)]


def test_every_point_ends_when_others_fail(run) -> None:
    fates = {"r/1": [PointState.HANG], "r/2": [PointState.CRASH]}
    state, states, records = run(Script(fates), 4)
    assert state is RunState.DONE
    assert states == {PointState.OK: 2, PointState.HANG: 1, PointState.CRASH: 1}
    assert [state for _, _, state in outcomes(records)] == ["ok", "hang", "crash", "ok"]
    assert isinstance(records[-1], RunEndRecord)


def test_a_lost_point_is_handed_out_again(run) -> None:
    _, states, records = run(Script({"r/0": [LOST, PointState.OK]}), 2)
    assert states == {PointState.OK: 2}
    assert outcomes(records) == [("r/0", 1, "lost"), ("r/1", 1, "ok"), ("r/0", 2, "ok")]
    [event] = [r for r in records if isinstance(r, EventRecord)]
    assert "p0: attempt 1 got lost (the node went away)" in event.message
    files = [(r.point_id, r.attempt) for r in records if isinstance(r, ArtifactRecord)]
    assert files == [("r/1", 1), ("r/0", 2)]


def test_a_point_that_stays_lost_ends_as_lost(run) -> None:
    _, states, records = run(Script({"r/0": [LOST, LOST, LOST]}), 1, retries=2)
    assert states == {PointState.LOST: 1}
    assert outcomes(records) == [("r/0", 1, "lost"), ("r/0", 2, "lost"), ("r/0", 3, "lost")]


def test_a_crashed_point_that_can_go_on_is_handed_out_again(run) -> None:
    """As often as `restarts` says, and as often for being lost; other failures would come again."""
    fates = {"r/0": ["crash", LOST, LOST, "crash", "ok"], "r/1": ["crash", "crash", "crash"], "r/2": ["error"]}
    _, states, records = run(Script(fates), 3, retries=0, restarts=2)
    assert states == {PointState.OK: 1, PointState.CRASH: 1, PointState.ERROR: 1}
    of_first = [(attempt, state) for point, attempt, state in outcomes(records) if point == "r/0"]
    assert of_first == [(1, "crash"), (2, "lost"), (3, "lost"), (4, "crash"), (5, "ok")]
    final = [(r.point_id, r.attempt) for r in records if isinstance(r, OutcomeRecord) and r.final]
    assert sorted(final) == [("r/0", 5), ("r/1", 3), ("r/2", 1)], "the others take no earlier outcome's place"
    assert [outcome for outcome in outcomes(records) if outcome[0] == "r/1"][-1] == ("r/1", 3, "crash")
    events = [r.message for r in records if isinstance(r, EventRecord)]
    assert events[0] == "p0: attempt 1 crashed (None); handed out again"


def test_failures_of_the_point_itself_are_not_retried(run) -> None:
    fates = {"r/0": [PointState.OOM], "r/1": [BatchEnded(PointState.OOM, "ended by Ray")]}
    _, states, records = run(Script(fates), 2, retries=5)
    assert states == {PointState.OOM: 2}
    assert len(outcomes(records)) == 2


def test_the_rest_of_a_lost_batch_is_handed_out_with_the_same_attempt_number(run) -> None:
    executor = Script({"r/1": [LOST, PointState.OK]})
    _, states, records = run(executor, 4, warm=True)
    assert states == {PointState.OK: 4}
    expected = ["r/0 1 ok", "r/1 1 lost", "r/2 1 ok", "r/3 1 ok", "r/1 2 ok"]
    assert [" ".join(map(str, outcome)) for outcome in outcomes(records)] == expected
    assert executor.batches == [["r/0", "r/1", "r/2", "r/3"], ["r/2", "r/3", "r/1"]]


def test_the_rest_of_a_lost_batch_comes_before_what_was_not_handed_out(run) -> None:
    executor = Script({"r/1": [LOST, PointState.OK]})
    run(executor, 12, warm=True, slots=2)
    assert [batch[0] for batch in executor.batches[:3]] == ["r/0", "r/3", "r/2"]


def test_a_batch_that_ends_without_an_outcome_counts_as_lost(run) -> None:
    _, states, _ = run(Script({"r/0": [BatchEnded(), BatchEnded()]}), 1)
    assert states == {PointState.LOST: 1}


def test_slots_bound_the_batches_at_a_time(run) -> None:
    executor = Script()
    run(executor, 7, slots=3)
    assert executor.most_at_a_time == 3
    assert executor.batches == [[f"r/{i}"] for i in range(7)]


def test_warm_slots_get_shrinking_shares(run) -> None:
    executor = Script()
    run(executor, 12, warm=True, slots=2)
    sizes = [len(batch) for batch in executor.batches]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1], sum(sizes)) == (3, 1, 12)


def test_cancelling_ends_the_remaining_points_and_the_executor(run) -> None:
    executor = Script({"r/1": ["silent"]})
    state, states, records = run(
        executor, 4, stopped=lambda: "SIGTERM" if len(executor.batches) == 2 and not executor._updates else None
    )
    assert state is RunState.CANCELLED
    assert executor.cancelled
    assert states == {PointState.OK: 1, PointState.CANCELLED: 3}
    assert [(p, s) for p, _, s in outcomes(records)][1:] == [(f"r/{i}", "cancelled") for i in (1, 2, 3)]
    assert (records[-1].type, records[-1].state, records[-1].reason) == ("run_end", "cancelled", "SIGTERM")


def test_a_cluster_that_is_gone_when_a_run_is_cancelled_leaves_it_cancelled(run) -> None:
    class Gone(Script):
        def cancel(self) -> None:
            raise ExecutorGone("the cluster went away")

    executor = Gone({"r/0": ["silent"]})
    state, states, records = run(executor, 2, stopped=lambda: "SIGTERM" if executor.batches else None)
    assert (state, states) == (RunState.CANCELLED, {PointState.CANCELLED: 2})
    assert records[-1].state == "cancelled"


def test_a_point_that_fails_because_everything_was_stopped_is_cancelled(run) -> None:
    signals: list[str] = []

    class Stopped(Script):
        def poll(self, timeout: float) -> list:
            """The signal that ends the point reaches the driver, too, while it waits for updates."""
            updates = super().poll(timeout)
            signals.extend("SIGTERM" for _, update in updates if isinstance(update, OutcomeRecord))
            return updates

    fates = {"r/0": [PointState.CRASH]}
    _, states, records = run(Stopped(fates), 1, stopped=lambda: signals[0] if signals else None)
    assert states == {PointState.CANCELLED: 1}
    assert outcomes(records) == [("r/0", 1, "cancelled")]


def test_a_store_that_is_another_folder_elsewhere_is_said_once(run, tmp_path) -> None:
    store = tmp_path / "store"
    (store / "r/0000/1").mkdir(parents=True)
    (store / "r/0000/1/stdout.txt").touch()
    _, states, records = run(Script(), 2, store=f"file://{store}")
    assert not [r for r in records if isinstance(r, EventRecord)]  # both files are there
    shutil.rmtree(store)
    _, states, records = run(Script(), 3, store=f"file://{store}")
    assert states == {PointState.OK: 3}
    [event] = [r for r in records if isinstance(r, EventRecord)]
    assert event.level == "warning"
    assert event.message == (
        "artifacts of node bench7 are not visible here: name a store that all nodes reach (NSA_ARTIFACT_STORE)"
    )


def test_a_store_that_hangs_holds_up_no_run(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ArtifactStore, "exists", lambda *_: time.sleep(8))
    begin = time.monotonic()
    _, states, records = run(Script(), 3, store=f"file://{tmp_path}")
    assert time.monotonic() - begin < 4
    assert states == {PointState.OK: 3}
    assert not [r for r in records if isinstance(r, EventRecord)]


def _answers_late(monkeypatch: pytest.MonkeyPatch, seconds: float, lacks: str) -> None:
    """Have the folder of artifacts answer after some seconds; it lacks files of paths with a certain part."""
    monkeypatch.setattr(ArtifactStore, "exists", lambda _, path: bool(time.sleep(seconds)) or lacks not in path)


@pytest.mark.parametrize("points", [1, 6])
def test_a_store_that_answers_late_is_said_to_be_another_folder(run, tmp_path, monkeypatch, points) -> None:
    """Also where the answer comes after the last point."""
    _answers_late(monkeypatch, 0.8, lacks="stdout")
    _, states, records = run(Script(), points, store=f"file://{tmp_path}")
    [event] = [r for r in records if isinstance(r, EventRecord)]
    assert event.message.startswith("artifacts of node bench7 are not visible here")
    assert isinstance(records[-1], RunEndRecord)
    assert states == {PointState.OK: points}


class Paced(Script):
    """An update every tenth of a second; `longest` is the longest time between two questions for one."""

    polled, longest = math.inf, 0.0

    def poll(self, timeout: float) -> list:
        self.longest = max(self.longest, time.monotonic() - self.polled)
        time.sleep(0.1)
        self.polled = time.monotonic()
        return super().poll(timeout)


def test_a_late_answer_is_told_while_the_run_goes_on(run, tmp_path, monkeypatch) -> None:
    _answers_late(monkeypatch, 0.6, lacks="stdout")
    _, _, records = run(Paced(), 6, store=f"file://{tmp_path}")
    [told] = [place for place, record in enumerate(records) if isinstance(record, EventRecord)]
    assert [r for r in records[told:] if isinstance(r, StartRecord)]


def test_a_store_that_answers_late_holds_up_no_other_update(run, tmp_path, monkeypatch) -> None:
    _answers_late(monkeypatch, 0.6, lacks="nothing")
    executor = Paced()
    _, _, records = run(executor, 4, store=f"file://{tmp_path}")
    assert executor.longest < 0.4  # 0.5 s, before
    assert not [r for r in records if isinstance(r, EventRecord)]


def test_files_of_each_node_are_looked_for_where_the_store_answers_late(run, tmp_path, monkeypatch) -> None:
    class Nodes(Script):
        def poll(self, timeout: float) -> list:
            """Each point runs on a node of its own."""
            return [(batch, _on_its_node(update)) for batch, update in super().poll(timeout)]

    _answers_late(monkeypatch, 0.2, lacks="r/0002")
    _, _, records = run(Nodes(), 4, store=f"file://{tmp_path}")
    [event] = [r for r in records if isinstance(r, EventRecord)]
    assert event.message.startswith("artifacts of node n2 are not visible here")


def _on_its_node(update: object) -> object:
    if isinstance(update, StartRecord):
        return update.model_copy(update={"node": f"n{update.point_id[-1]}"})
    if isinstance(update, ArtifactRecord):
        path = f"r/000{update.point_id[-1]}/1/stdout.txt"
        return update.model_copy(update={"artifact": update.artifact.model_copy(update={"path": path})})
    return update


def test_a_supervisor_that_is_lost_while_it_keeps_files_is_said_on_the_point(run) -> None:
    class Lost(Script):
        def poll(self, timeout: float) -> list:
            """Between the outcome of a point and its file the node goes away."""
            updates = super().poll(timeout)
            return [(batch, LOST if isinstance(update, ArtifactRecord) else update) for batch, update in updates]

    _, states, records = run(Lost(), 1)
    assert states == {PointState.OK: 1}
    [event] = [r for r in records if isinstance(r, EventRecord)]
    assert (event.point_id, event.message) == ("r/0", "some of its files may be missing: the node went away")


def test_files_that_a_cancelled_run_did_not_keep_are_said_on_their_point(run) -> None:
    class Slow(Script):
        def poll(self, timeout: float) -> list:
            """The file of the point takes longer than the run."""
            return [(batch, u) for batch, u in super().poll(timeout) if not isinstance(u, ArtifactRecord | BatchEnded)]

    executor = Slow()
    _, _, records = run(executor, 1, stopped=lambda: None if executor._updates or not executor.batches else "SIGTERM")
    [event] = [r for r in records if isinstance(r, EventRecord)]
    assert (event.point_id, event.message) == ("r/0", "some of its files may be missing: SIGTERM")
    assert [(p, s) for p, _, s in outcomes(records)] == [("r/0", "ok")]
