"""The recorder: a journal or a store that is away, slow, full or refuses a record costs no record and no time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from full_disk import full_disk
from sqlalchemy import delete
from waiting import wait_for

from jobs.schema.states import PointState
from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.messages import Progress
from orchestrator.run import backlog, resume
from orchestrator.run.recorder import Recorder
from orchestrator.store import Store, journal, queries, upgrade
from orchestrator.store.journal import Journal, JournalFull
from orchestrator.store.models import Run
from orchestrator.store.records import EventRecord, MetricData, OutcomeRecord, Record, SeriesRecord, StartRecord, now

AWAY = StoreUnavailable("NSA_DATABASE_URL: 'x': cannot be reached")


def note(message: str) -> EventRecord:
    return EventRecord(run_id="r", message=message)


def texts(records: list[Record]) -> list[str]:
    return [record.message for record in records if isinstance(record, EventRecord)]


class FlakyStore:
    """A store that accepts records while `error` is None, and answers while `answers` is set."""

    name = "flaky"

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.kept: list[Record] = []
        self.signs: list[str] = []
        self.answers = threading.Event()
        self.answers.set()

    def apply_many(self, records) -> None:
        self._answer()
        self.kept += [record for record in records if record not in self.kept]

    def apply_each(self, records) -> list[tuple[Record, str]]:
        return [(record, str(self.error)) for record in records]

    def beat(self, run_id: str, point_id: str, at: object, phase: str, *_: object) -> None:
        self._answer()
        self.signs.append(phase)

    def _answer(self) -> None:
        assert self.answers.wait(60)
        if self.error:
            raise self.error


@pytest.fixture
def flaky() -> Iterator[FlakyStore]:
    store = FlakyStore()
    yield store
    store.answers.set()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / journal.NAME


@pytest.fixture
def recorder(path: Path, flaky: FlakyStore, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setattr("orchestrator.run.storing._RETRY_S", 0.01)
    monkeypatch.setattr(backlog, "_RETRY_S", 0.0)
    with Journal(path) as book:
        yield Recorder("r", book, flaky, told.append)  # type: ignore[arg-type]


def stored(recorder: Recorder) -> bool:
    recorder.look()
    return recorder.stored


def test_a_database_gets_missed_records_later_and_in_order(recorder, flaky, told, path) -> None:
    recorder.write([note("a")])
    wait_for(lambda: stored(recorder))
    flaky.error = AWAY
    recorder.write([note("b")])
    recorder.write([note("c")])
    assert texts(list(journal.read(path))) == ["a", "b", "c"]
    wait_for(lambda: bool(recorder.look() or told))
    assert not recorder.stored
    flaky.error = None
    wait_for(lambda: bool(recorder.look() or len(told) == 2))
    wait_for(lambda: stored(recorder))
    assert texts(flaky.kept)[:3] == ["a", "b", "c"]
    assert flaky.kept[3].message.startswith("the database was away for ")
    assert flaky.kept == list(journal.read(path))
    assert [line.split(":")[0] for line in told] == ["warning", "warning"]  # one line per change, not one per record


def test_a_database_that_does_not_answer_holds_nothing_up(recorder, flaky, told, path, monkeypatch) -> None:
    """Tell within two seconds that records are on their way to it; store them when it answers."""
    flaky.answers.clear()
    begun = time.monotonic()
    for number in range(200):
        recorder.write([note(str(number))])
        recorder.progress(Progress("r", "r/0", now(), "timing", number, 200))
    assert time.monotonic() - begun < 1.5
    while not told:
        silent_s = recorder._storing.silent_s
        recorder.look()
        assert told or silent_s <= 1.5
        time.sleep(0.01)
    assert time.monotonic() - begun < 2.5
    assert float(told[0].partition("has not answered for ")[2].partition(" s")[0]) >= 1.5
    assert told[0].endswith("results go to the journal and are stored when it is back")
    clock = [asked := time.monotonic()]
    sleep = lambda seconds: clock.append(clock[-1] + seconds)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.run.recorder.time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=sleep))
        recorder.close(patience_s=0.2)
        assert 0.2 <= clock[-1] - asked < 0.3
        stopped_at = clock[-1] + 5
        recorder.close(60, lambda: "SIGTERM" if clock[-1] >= stopped_at else None)
        assert clock[-1] - stopped_at < 1
    assert recorder.missing() == [f"records not in the database: 200; store them with: nsa import {path}"]
    flaky.answers.set()
    recorder.close(patience_s=20)
    assert recorder.stored
    assert recorder.missing() == []
    assert flaky.kept == list(journal.read(path))
    assert len(flaky.kept) == 201


def test_progress_is_dropped_while_the_database_is_away(recorder, flaky, told) -> None:
    recorder.progress(Progress("r", "r/0", now(), "first", 1, 2))
    wait_for(lambda: flaky.signs == ["first"])
    flaky.error = AWAY
    recorder.write([note("a")])
    wait_for(lambda: bool(recorder.look() or told))
    recorder.progress(Progress("r", "r/0", now(), "second", 1, 2))
    flaky.error = None
    wait_for(lambda: stored(recorder))
    recorder.progress(Progress("r", "r/0", now(), "third", 1, 2))
    wait_for(lambda: flaky.signs == ["first", "third"])


def test_closing_waits_for_the_database_and_then_gives_up(recorder, flaky) -> None:
    flaky.error = AWAY
    recorder.write([note("a")])
    recorder.close(patience_s=0.2)
    assert not recorder.stored
    flaky.error = None
    asked = time.monotonic()
    recorder.close(patience_s=60)
    assert recorder.stored
    assert time.monotonic() - asked < 60  # it waits for the records, not for its patience


def test_records_that_the_journal_got_while_they_were_stored_are_stored_from_there(path) -> None:
    with Journal(path) as book:
        waiting = backlog.Backlog(book)
        with full_disk(path), pytest.raises(JournalFull):
            waiting.append([note("a")])
        batch = waiting.take(10)
        assert (texts(batch.records), batch.end) == (["a"], None)
        waiting._try_at = 0.0
        waiting.append([note("b")])
        waiting.stored(batch)
        assert (waiting.waiting, waiting.only_here) == (2, 0)
        batch = waiting.take(10)
        assert texts(batch.records) == ["a", "b"]
        waiting.stored(batch)
        assert waiting.waiting == 0


def test_after_a_refusal_only_the_journal_is_written(recorder, flaky, told, path) -> None:
    flaky.error = StoreError("NSA_DATABASE_URL: 'x': refused the data")
    recorder.write([note("a")])
    wait_for(lambda: bool(recorder.look() or told))
    recorder.write([note("b")])
    recorder.close(patience_s=20)
    assert not recorder.stored
    kept = texts(list(journal.read(path)))
    assert (kept[0], kept[-1]) == ("a", "b")
    assert "no longer follows this run" in kept[1]
    assert len(told) == 1
    assert recorder.missing()[0].startswith("records not in the database: 3; ")


def test_a_full_disk_costs_no_record(recorder, flaky, told, path) -> None:
    recorder.write([note("a")])
    with full_disk(path):
        recorder.write([note("b")])
        recorder.write([note("c")])
        assert "cannot be written (File too large)" in told[0]
        assert told[0].endswith("until then results are kept in memory and in the database")
        wait_for(lambda: stored(recorder))
        [line] = recorder.missing()
        assert line.startswith("warning: records that the journal lacks: 3 (journal: ")
        assert recorder.kept
        assert texts(list(journal.read(path))) == ["a"]
    recorder.write([note("d")])
    recorder.close(patience_s=20)
    kept = list(journal.read(path))
    assert [texts(kept)[place] for place in (0, 1, 3, 4)] == ["a", "b", "c", "d"]
    assert kept == flaky.kept
    assert len(told) == 2
    assert "it is whole now" in told[1]
    assert recorder.missing() == []


@pytest.mark.parametrize("database", ["there", "away"])
def test_a_journal_that_is_removed_is_told_and_what_nothing_has_is_said_to_be_lost(
    recorder, flaky, told, path, database: str
) -> None:
    recorder.write([note("a")])
    wait_for(lambda: stored(recorder))
    path.unlink()
    flaky.error = AWAY if database == "away" else None
    recorder.write([note("b")])
    assert "was moved away or removed" in told[0]
    recorder.close(patience_s=0.3)
    assert recorder.kept is (database == "there")
    assert any("the journal lacks" in line or "which are lost" in line for line in recorder.missing())


def test_a_journal_that_is_put_back_is_whole(recorder, flaky, told, path, tmp_path) -> None:
    recorder.write([note("a")])
    path.rename(tmp_path / "aside")
    recorder.write([note("b")])
    (tmp_path / "aside").rename(path)
    recorder.close(patience_s=20)
    assert texts(list(journal.read(path)))[:2] == ["a", "b"]
    assert recorder.missing() == []


def test_results_that_nothing_takes_are_said_to_be_lost(recorder, flaky, path) -> None:
    flaky.error = AWAY
    recorder.write([note("a")])
    with full_disk(path):
        recorder.write([note("b")])
        recorder.close(patience_s=0.2)
        assert not recorder.kept
        lost, rest = recorder.missing()
    assert lost.startswith("error: records neither in the journal nor in the database: 2, which are lost: journal: ")
    assert lost.endswith("python -m jobs --resume r")
    assert rest == f"records not in the database: 1; store them with: nsa import {path}"


def test_a_run_that_cannot_be_journalled_does_not_begin(recorder, flaky, path) -> None:
    with full_disk(path), pytest.raises(JournalFull, match="NSA_ARTIFACTS"):
        recorder.begin([note("a")])
    assert flaky.kept == []


def test_a_full_disk_with_more_results_than_fit_the_memory_loses_none(recorder, flaky, path, monkeypatch) -> None:
    """Results are kept beyond it: the limit is for samples."""
    monkeypatch.setattr(backlog, "_MOST_IN_MEMORY", 10)
    store = flaky.apply_many
    monkeypatch.setattr(flaky, "apply_many", lambda records: (time.sleep(0.05), store(records))[1])
    with full_disk(path):
        for number in range(100):
            recorder.write([note(f"{number}")])
        wait_for(lambda: stored(recorder), 30)
        recorder.close(patience_s=1)
    assert {f"{number}" for number in range(100)} <= set(texts(flaky.kept))


def test_memory_is_bounded_by_leaving_out_samples(recorder, flaky, path, monkeypatch) -> None:
    monkeypatch.setattr(backlog, "_MOST_IN_MEMORY", 10)
    flaky.error = AWAY
    sample = SeriesRecord(
        run_id="r", point_id="r/0", attempt=1, rank=0, name="time", unit="s", steps=(1,), times=(1.0,), values=(1.0,)
    )
    recorder.write([note("a")])
    with full_disk(path):
        for _ in range(50):
            recorder.write([sample])
        recorder.write([note("b")])
    flaky.error = None
    recorder.close(patience_s=20)
    assert recorder.stored
    assert not recorder.kept
    kept = list(journal.read(path))
    assert {"a", "b"} <= set(texts(kept))
    assert sum(isinstance(record, SeriesRecord) for record in kept) <= 10


@pytest.mark.parametrize("place", [0, -1])
def test_a_record_that_the_database_refuses_costs_no_other(
    sqlite_store: Store, sweep, path, told, place, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its point ends in the database as an error that says why, and the run goes on being stored, also when resumed."""
    monkeypatch.setattr("orchestrator.run.recorder.SLOW_S", 600)  # a slow disk is not told of among the rest
    run, *rest = sweep()
    bad = [record for record in rest if isinstance(record, OutcomeRecord)][place]
    twice = bad.model_copy(update={"metrics": bad.metrics * 2})
    with Journal(path) as book, ExitStack() as stack:
        recorder = Recorder(run.run_id, book, sqlite_store, told.append)
        stack.callback(recorder.close, 0)
        recorder.begin([run])
        recorder.write([twice if record is bad else record for record in rest])
        recorder.close(patience_s=20)
        assert recorder.stored, told
    assert len(told) == 1
    told.clear()
    with Store.open(f"sqlite:///{tmp_path / 'other.db'}") as other:  # it refuses the record that the journal has, too
        for store in (sqlite_store, other):
            with resume.opened(run.run_id, path.parent, store, told.append) as (_, history):
                assert history.points[bad.point_id].state == PointState.ERROR
    assert ["is not stored: " in line for line in told] == [True]
    states = queries.points(sqlite_store, run.run_id).set_index("point_id")
    assert states.state.pop(bad.point_id) == PointState.ERROR
    assert "its results cannot be kept" in states.reason[bad.point_id]
    assert set(states.state) == {PointState.OK, PointState.ERROR}
    assert (states.state == PointState.OK).sum() == 7
    found = queries.run(sqlite_store, run.run_id)
    assert found is not None
    assert found["state"] == "done"


@pytest.mark.parametrize("file", ["another", "none for a while", "the same without the run"])
def test_a_database_that_is_replaced_while_a_run_goes_on_gets_all_of_it(
    sqlite_store: Store, sweep, path, told, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome is no error because the database does not know its point."""
    monkeypatch.setattr("orchestrator.run.storing._RETRY_S", 0.01)
    records, database = sweep(), tmp_path / "nsa.db"
    place = next(number for number, record in enumerate(records) if isinstance(record, OutcomeRecord))
    with Journal(path) as book:
        recorder = Recorder(records[0].run_id, book, sqlite_store, told.append)
        recorder.begin(records[:place])
        wait_for(lambda: stored(recorder))
        if file == "the same without the run":
            with sqlite_store.session(writes=True) as session:
                session.execute(delete(Run))
        else:
            for part in tmp_path.glob("nsa.db*"):
                part.rename(tmp_path / f"before-{part.name}")
        if file == "another":
            upgrade(f"sqlite:///{database}")
        recorder.write([records[place]])
        if file == "none for a while":
            wait_for(lambda: bool(recorder.look() or told))
            assert not database.exists()
            for part in tmp_path.glob("before-*"):
                part.rename(tmp_path / part.name.removeprefix("before-"))
        wait_for(lambda: stored(recorder))
        recorder.write(records[place + 1 :])
        recorder.close(patience_s=20)
        assert recorder.stored, told
    assert set(queries.points(sqlite_store, records[0].run_id).state) == {PointState.OK}
    assert {record.state for record in journal.read(path) if isinstance(record, OutcomeRecord)} == {PointState.OK}
    assert told[-1].startswith("warning: the database ")


def test_a_table_that_is_gone_turns_no_result_into_an_error(store: Store, sweep, path, told) -> None:
    records = sweep()
    with Journal(path) as book:
        recorder = Recorder(records[0].run_id, book, store, told.append)
        recorder.begin(records[:1])
        wait_for(lambda: stored(recorder))
        with store.engine.begin() as connection:
            connection.exec_driver_sql(
                "DROP TABLE metric" + (" CASCADE" if connection.dialect.name != "sqlite" else "")
            )
        recorder.write(records[1:])
        recorder.close(patience_s=0.5)
        assert not recorder.stored
        assert len(recorder.missing()) == 1
    assert {record.state for record in journal.read(path) if isinstance(record, OutcomeRecord)} == {PointState.OK}
    assert ["metric" in line for line in told] == [True]


def test_a_record_of_no_point_is_told_and_left_out(sqlite_store: Store, sweep, path, told) -> None:
    records = sweep()
    run_id = records[0].run_id
    stray = StartRecord(run_id=run_id, point_id=f"{run_id}/99", attempt=1)
    with Journal(path) as book:
        recorder = Recorder(run_id, book, sqlite_store, told.append)
        recorder.begin(records[:1])
        recorder.write([*records[1:5], stray, *records[5:]])
        recorder.close(patience_s=20)
        assert recorder.stored, told
    assert "99: its start is not kept" in told[0]
    assert set(queries.points(sqlite_store, run_id).state) == {PointState.OK}


def test_an_outcome_that_no_journal_could_give_back_is_said_on_its_point(recorder, path) -> None:
    outcome = OutcomeRecord(
        run_id="r",
        point_id="r/0",
        attempt=1,
        state=PointState.OK,
        metrics=(MetricData(name="time", unit="ms", value=float("nan")),),
    )
    recorder.write([outcome, note("a")])
    [kept, _] = journal.read(path)
    assert isinstance(kept, OutcomeRecord)
    assert (kept.state, kept.metrics) == (PointState.ERROR, ())
    assert "metrics.0.value" in str(kept.reason)


def test_text_from_outside_is_text(recorder, path) -> None:
    odd = {"\udcff": ["\udcfe", float("inf"), ("\udcfd",)], "x": {"y": float("nan")}, "long": 10**400}
    outcome = OutcomeRecord(
        run_id="r",
        point_id="r/0",
        attempt=1,
        state=PointState.OK,
        reason="caf\udcff \0",
        route={"cmp": "\udcff"},
        environment=odd,
        metrics=(MetricData(name="time", unit="ms", value=1.0, method="caf\udcff é"),),
    )
    recorder.write([outcome, note("\ud800")])
    kept = list(journal.read(path))
    assert kept[0] == outcome
    assert texts(kept) == ["\\ud800"]
    assert outcome.environment == {"\\udcff": ["\\udcfe", "inf", ["\\udcfd"]], "x": {"y": "nan"}, "long": 10**400}
    assert outcome.metrics[0].method == "caf\\udcff é"
