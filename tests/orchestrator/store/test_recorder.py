"""The journal survives torn lines, full disks and second writers; a database that is away costs nothing."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import wait_for
from sqlalchemy import delete

from jobs.schema.states import PointState
from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.store import Store, journal, queries
from orchestrator.store.journal import Journal, JournalError, JournalFull, Recorder
from orchestrator.store.models import Run
from orchestrator.store.records import EventRecord, OutcomeRecord, Progress, Record, StartRecord, now

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

    def beat(self, sign: Progress) -> None:
        self._answer()
        self.signs.append(sign.phase)

    def take_lease(self, run_id: str) -> None:
        self._answer()

    end_lease = take_lease

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
    monkeypatch.setattr("orchestrator.store.journal._LAST_RETRY_S", 0.01)
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
    """Say that records are on their way to it; store them when it answers."""
    flaky.answers.clear()
    for number in range(200):
        recorder.write([note(str(number))])
        recorder.progress(Progress("r", "r/0", now(), "timing", number, 200))
    wait_for(lambda: bool(recorder.look() or told), 60)
    assert float(told[0].partition("has not answered for ")[2].partition(" s")[0]) >= 1.5
    assert told[0].endswith("results go to the journal and are stored when it is back")
    clock = [asked := time.monotonic()]
    sleep = lambda seconds: clock.append(clock[-1] + seconds)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.store.journal.time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=sleep))
        recorder.close(patience_s=0.2)
        assert 0.2 <= clock[-1] - asked < 0.3
        stopped_at = clock[-1] + 5
        lines = recorder.close(60, lambda: "SIGTERM" if clock[-1] >= stopped_at else None)
        assert clock[-1] - stopped_at < 1
    assert lines == [f"records are missing from the database; store them with: nsa import {path}"]
    flaky.answers.set()
    assert recorder.close(patience_s=20) == []
    assert recorder.stored
    assert flaky.kept == list(journal.read(path))
    assert len(flaky.kept) == 201


def test_after_a_refusal_only_the_journal_is_written(recorder, flaky, told, path) -> None:
    flaky.error = StoreError("NSA_DATABASE_URL: 'x': refused the data")
    recorder.write([note("a")])
    wait_for(lambda: bool(recorder.look() or told))
    recorder.write([note("b")])
    lines = recorder.close(patience_s=20)
    assert not recorder.stored
    kept = texts(list(journal.read(path)))
    assert (kept[0], kept[-1]) == ("a", "b")
    assert "no longer follows this run" in kept[1]
    assert len(told) == 1
    assert lines[0].startswith("records are missing from the database; ")


def test_a_database_that_lost_the_run_while_it_goes_on_gets_all_of_it(
    sqlite_store: Store, sweep, path, told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome is no error because the database, which was replaced, does not know its point."""
    monkeypatch.setattr("orchestrator.store.journal._LAST_RETRY_S", 0.01)
    records = sweep()
    place = next(number for number, record in enumerate(records) if isinstance(record, OutcomeRecord))
    with Journal(path) as book:
        recorder = Recorder(records[0].run_id, book, sqlite_store, told.append)
        recorder.write(records[:place])
        wait_for(lambda: stored(recorder))
        with sqlite_store.session(writes=True) as session:
            session.execute(delete(Run))
        recorder.write(records[place:])
        wait_for(lambda: stored(recorder))
        recorder.close(patience_s=20)
        assert recorder.stored, told
    assert set(queries.points(sqlite_store, records[0].run_id).state) == {PointState.OK}
    assert {record.state for record in journal.read(path) if isinstance(record, OutcomeRecord)} == {PointState.OK}
    assert told[-1].startswith("warning: the database ")


@contextmanager
def full_disk(path: Path, room: int = 10) -> Iterator[None]:
    """A context in which no file of this process can grow beyond the size of `path` and `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def messages(path: Path) -> list[str]:
    return [record.message for record in journal.read(path) if isinstance(record, EventRecord)]


@pytest.mark.parametrize("before", [[], ["a"]], ids=["alone", "after a record"])
@pytest.mark.parametrize("torn", ['{"v":1,"run_id":"r","type":"ev', '{"v":1}', "\0\0\0", '{"half": "ü'])
def test_a_torn_last_line_is_skipped_and_then_removed(path: Path, torn: str, before: list[str]) -> None:
    with Journal(path) as book:
        book.append(map(note, before))
    with path.open("ab") as file:
        file.write(torn.encode()[:-1])
    assert messages(path) == before
    with Journal(path) as book:
        book.append([note("b")])
    assert messages(path) == [*before, "b"]


@pytest.mark.parametrize("point_id", ["s/0", "r", "r/0/1", "rr/0", "r/00"])
def test_a_line_that_names_another_runs_point_is_refused(path: Path, point_id: str) -> None:
    with Journal(path) as book:
        book.append([StartRecord(run_id="r", point_id="r/0", attempt=1)])
        book.append([StartRecord(run_id="r", point_id=point_id, attempt=1)])
    with pytest.raises(JournalError, match=f"line 2 is of '{point_id}', in the journal of 'r'"):
        messages(path)


def test_one_writer_at_a_time(path: Path) -> None:
    with Journal(path), pytest.raises(JournalError, match="being written by another process"):
        Journal(path)
    with Journal(path) as book:
        book.append([note("a")])
    assert messages(path) == ["a"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.gz"])
def test_a_pipe_in_place_of_a_journal_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for use in (messages, Journal):
        with pytest.raises(JournalError):
            use(tmp_path / name)


def test_a_disk_that_takes_no_more_leaves_the_journal_as_it_was(path: Path) -> None:
    with Journal(path) as book:
        book.append([note("a")])
        before = path.read_bytes()
        with (
            full_disk(path),
            pytest.raises(JournalFull, match=r"cannot be written \(File too large\); free space there"),
        ):
            book.append([note("b"), note("c")])
        assert path.read_bytes() == before
        book.append([note("d")])
    assert messages(path) == ["a", "d"]
