"""The scheduler with a scripted executor: retries, batches, cancellation."""

import shutil
from collections import deque
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from jobs.schema.point import Machine, Point
from jobs.schema.states import PointState, RunState
from jobs.specs.spec import Deadlines
from orchestrator.errors import ExecutorGone
from orchestrator.execute.supervisor import Assignment, BatchEnded, Conditions
from orchestrator.run.plan import Plan
from orchestrator.run.progress import Watcher
from orchestrator.run.scheduler import Scheduler
from orchestrator.store import Store, journal
from orchestrator.store.journal import Journal, Recorder
from orchestrator.store.records import (
    ArtifactData,
    ArtifactRecord,
    EventRecord,
    OutcomeRecord,
    RunEndRecord,
    RunRecord,
    StartRecord,
)

LOST = BatchEnded(PointState.LOST, "the node went away")


class Script:
    """An executor that ends each point's attempts as scripted: with a state, with LOST or not at all ("silent")."""

    def __init__(self, fates: dict[str, list] | None = None) -> None:
        self.fates = fates or {}
        self.batches: list[list[str]] = []
        self.most_at_a_time = 0
        self.updates: deque = deque()
        self._running: set[int] = set()

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        self.batches.append([a.point_id for a in assignments])
        self._running.add(batch)
        self.most_at_a_time = max(self.most_at_a_time, len(self._running))
        for a in assignments:
            fate = self.fates.get(a.point_id, [PointState.OK]).pop(0)
            self.updates.append((batch, StartRecord(run_id="r", point_id=a.point_id, attempt=a.attempt, node="bench7")))
            if isinstance(fate, BatchEnded):
                self.updates.append((batch, fate))
                return
            if fate == "silent":
                return
            about = {"run_id": "r", "point_id": a.point_id, "attempt": a.attempt}
            self.updates.append((batch, OutcomeRecord.model_validate({**about, "state": fate})))
            file = ArtifactData(name="stdout.txt", path=f"r/0000/{a.attempt}/stdout.txt", size=0, sha256="")
            self.updates.append((batch, ArtifactRecord.model_validate({**about, "artifact": file})))
        self.updates.append((batch, BatchEnded()))

    def poll(self, timeout: float) -> list:
        if not self.updates:
            return []
        batch, update = self.updates.popleft()
        if isinstance(update, BatchEnded):
            self._running.discard(batch)
        return [(batch, update)]

    def cancel(self, grace_s: float) -> None: ...


@pytest.fixture
def run(tmp_path: Path):
    def run(executor: Script, count: int, *, warm=False, stopped=lambda: None, store=None, further=None, **often):
        points = [Point("k", f"p{number}", {}) for number in range(count)]
        begun = RunRecord(run_id="r", name="t", kind="k", spec={}, spec_hash="")
        todo = Plan(begun, points, {None: Machine("cpu", "test", 8 << 30)}, further or (lambda ended: ()))
        conditions, path = Conditions("cpu", Deadlines(), warm=warm, store=store), tmp_path / journal.NAME
        with (
            Journal(path) as book,
            Watcher(todo.labels, 0, [], StringIO()) as watcher,
            Recorder("r", book, MagicMock(Store), print) as recorder,
        ):
            often = {"slots": 1, "retries": 1, **often}
            scheduler = Scheduler(executor, recorder, watcher, todo, conditions, **often)  # type: ignore[arg-type]
            state = scheduler.run(stopped)
        return state, todo.states, list(journal.read(path))

    return run


def outcomes(records) -> list[str]:
    return [f"{r.point_id} {r.attempt} {r.state}" for r in records if isinstance(r, OutcomeRecord)]


def events(records) -> list[EventRecord]:
    return [r for r in records if isinstance(r, EventRecord)]


def test_every_point_ends_when_others_fail(run) -> None:
    """Failures of a point itself are not retried."""
    fates = {"r/1": ["hang"], "r/2": ["crash"], "r/3": ["oom"], "r/4": [BatchEnded(PointState.OOM, "ended by Ray")]}
    state, states, records = run(Script(fates), 6, retries=5)
    assert state is RunState.DONE
    assert states == {PointState.OK: 2, PointState.HANG: 1, PointState.CRASH: 1, PointState.OOM: 2}
    ends = ["ok", "hang", "crash", "oom", "oom", "ok"]
    assert outcomes(records) == [f"r/{number} 1 {state}" for number, state in enumerate(ends)]
    assert isinstance(records[-1], RunEndRecord)


def test_a_lost_point_is_handed_out_again(run) -> None:
    _, states, records = run(Script({"r/0": [LOST, "ok"], "r/2": [LOST] * 3, "r/3": [BatchEnded()] * 3}), 4, retries=2)
    assert states == {PointState.OK: 2, PointState.LOST: 2}
    assert sorted(outcomes(records)) == [
        *("r/0 1 lost", "r/0 2 ok", "r/1 1 ok"),
        *(f"r/{point} {attempt} lost" for point in (2, 3) for attempt in (1, 2, 3)),
    ]
    assert (events(records)[0].point_id, events(records)[0].message) == (
        "r/0",
        "attempt 1 got lost (the node went away); handed out again",
    )
    files = [(r.point_id, r.attempt) for r in records if isinstance(r, ArtifactRecord)]
    assert files == [("r/1", 1), ("r/0", 2)]


def test_a_crashed_point_that_can_go_on_is_handed_out_again(run) -> None:
    """As often as `restarts` says, and as often for being lost; other failures would come again."""
    fates = {"r/0": ["crash", LOST, LOST, "crash", "ok"], "r/1": ["crash", "crash", "crash"], "r/2": ["error"]}
    _, states, records = run(Script(fates), 3, retries=0, restarts=2)
    assert states == {PointState.OK: 1, PointState.CRASH: 1, PointState.ERROR: 1}
    of_first = [outcome for outcome in outcomes(records) if outcome.startswith("r/0")]
    assert of_first == ["r/0 1 crash", "r/0 2 lost", "r/0 3 lost", "r/0 4 crash", "r/0 5 ok"]
    final = [(r.point_id, r.attempt) for r in records if isinstance(r, OutcomeRecord) and r.final]
    assert sorted(final) == [("r/0", 5), ("r/1", 3), ("r/2", 1)], "the others take no earlier outcome's place"


@pytest.mark.parametrize("gone", [False, True], ids=["", "the cluster, too"])
def test_cancelling_ends_the_remaining_points_and_the_executor(run, monkeypatch, gone: bool) -> None:
    def cancel(grace_s: float) -> None:
        cancelled.append(True)
        if gone:
            raise ExecutorGone("the cluster went away")

    executor, cancelled = Script({"r/1": ["silent"]}), []
    monkeypatch.setattr(executor, "cancel", cancel)
    state, states, records = run(
        executor, 4, stopped=lambda: "SIGTERM" if len(executor.batches) == 2 and not executor.updates else None
    )
    assert (state, cancelled) == (RunState.CANCELLED, [True])
    assert states == {PointState.OK: 1, PointState.CANCELLED: 3}
    assert outcomes(records) == ["r/0 1 ok", *(f"r/{i} 1 cancelled" for i in (1, 2, 3))]
    assert (records[-1].type, records[-1].state, records[-1].reason) == ("run_end", "cancelled", "SIGTERM")


def test_a_point_that_fails_because_everything_was_stopped_is_cancelled(run) -> None:
    signals: list[str] = []

    class Stopped(Script):
        def poll(self, timeout: float) -> list:
            """The signal that ends the point reaches the driver, too, while it waits for updates."""
            updates = super().poll(timeout)
            signals.extend("SIGTERM" for _, update in updates if isinstance(update, OutcomeRecord))
            return updates

    _, states, records = run(Stopped({"r/0": ["crash"]}), 1, stopped=lambda: signals[0] if signals else None)
    assert states == {PointState.CANCELLED: 1}
    assert outcomes(records) == ["r/0 1 cancelled"]


def test_a_store_that_is_another_folder_elsewhere_is_warned_of_once(run, tmp_path) -> None:
    store = tmp_path / "store"
    (store / "r/0000/1").mkdir(parents=True)
    (store / "r/0000/1/stdout.txt").touch()
    *_, records = run(Script(), 2, store=f"file://{store}")
    assert events(records) == []  # it is there
    shutil.rmtree(store)
    _, states, records = run(Script(), 3, store=f"file://{store}")
    assert states == {PointState.OK: 3}
    [event] = events(records)
    assert event.message == (
        "artifacts of node bench7 are not visible here: name a store that all nodes reach (NSA_ARTIFACT_STORE)"
    )


def test_a_kind_whose_next_points_raise_costs_no_outcome(run, tmp_path) -> None:
    def further(ended):
        assert outcomes(journal.read(tmp_path / journal.NAME))[len(ended) - 1].endswith("ok"), "journalled before"
        raise RuntimeError("a bug of the kind")

    state, states, records = run(Script(), 2, further=further)
    assert (state, states, outcomes(records)) == (RunState.DONE, {PointState.OK: 2}, ["r/0 1 ok", "r/1 1 ok"])
    [event] = events(records)
    assert (event.level, event.message) == (
        "error",
        "kind: 'k': its next_points failed, and no further points are measured: RuntimeError: a bug of the kind; "
        "mend it, then continue with --resume r",
    )
