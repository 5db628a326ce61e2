"""The journal survives torn lines and second writers; the recorder survives an unreachable database."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import journal
from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.journal import Journal, JournalError
from orchestrator.messages import Progress
from orchestrator.records import EventRecord, Record, StartRecord, now
from orchestrator.run.recorder import Recorder


def note(message: str) -> EventRecord:
    return EventRecord(run_id="r", message=message)


def messages(path: Path) -> list[str]:
    return [record.message for record in journal.read(path) if isinstance(record, EventRecord)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / journal.NAME


def test_written_records_are_read_back(path: Path) -> None:
    records = [note("a"), note("b – ü\n")]
    with Journal(path) as book:
        book.append(records)
    assert list(journal.read(path)) == records


@pytest.mark.parametrize("torn", ['{"v":1,"run_id":"r","type":"ev', '{"v":1}', "\0\0\0", '{"half": "ü'])
def test_a_torn_last_line_is_skipped_and_then_removed(path: Path, torn: str) -> None:
    with Journal(path) as book:
        book.append([note("a")])
    with path.open("ab") as file:
        file.write(torn.encode()[:-1])
    assert messages(path) == ["a"]
    with Journal(path) as book:
        book.append([note("b")])
    assert messages(path) == ["a", "b"]


def test_a_journal_of_a_torn_line_only_is_empty(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"v":1')
    assert messages(path) == []
    with Journal(path) as book:
        book.append([note("a")])
    assert messages(path) == ["a"]


def test_a_malformed_line_in_the_middle_is_named(path: Path) -> None:
    with Journal(path) as book:
        book.append([note("a"), note("b")])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "nonsense", lines[1]]) + "\n")
    with pytest.raises(JournalError, match="line 2 is no record"):
        messages(path)


@pytest.mark.parametrize("point_id", ["s/0", "r", "r/", "r/0/1", "r/x", "rr/0"])
def test_a_line_that_names_another_runs_point_is_refused(path: Path, point_id: str) -> None:
    with Journal(path) as book:
        book.append([StartRecord(run_id="r", point_id="r/0", attempt=1)])
        book.append([StartRecord(run_id="r", point_id=point_id, attempt=1)])
    with pytest.raises(JournalError, match=f"line 2 names the point '{point_id}', which is not one of its run 'r'"):
        messages(path)


def test_one_writer_at_a_time(path: Path) -> None:
    with Journal(path), pytest.raises(JournalError, match="being written by another process"):
        Journal(path)
    with Journal(path) as book:
        book.append([note("a")])
    assert messages(path) == ["a"]


def test_a_missing_journal_is_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be read"):
        messages(tmp_path / "none.jsonl")


class FlakyStore:
    """A store that accepts records while `error` is None."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.kept: list[Record] = []
        self.beats = 0

    def apply_many(self, records) -> None:
        if self.error:
            raise self.error
        self.kept += records

    def beat(self, *_: object) -> None:
        if self.error:
            raise self.error
        self.beats += 1


AWAY = StoreUnavailable("NSA_DATABASE_URL: 'x': cannot be reached")


@pytest.fixture
def flaky() -> FlakyStore:
    return FlakyStore()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def recorder(path: Path, flaky: FlakyStore, told: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("orchestrator.run.recorder._RETRY_S", 0.0)
    with Journal(path) as book:
        yield Recorder("r", book, flaky, told.append)  # type: ignore[arg-type]


def test_a_database_gets_missed_records_later_and_in_order(recorder, flaky, told, path) -> None:
    recorder.write([note("a")])
    flaky.error = AWAY
    recorder.write([note("b")])
    recorder.write([note("c")])
    assert messages(path) == ["a", "b", "c"]
    assert not recorder.stored
    flaky.error = None
    recorder.write([note("d")])
    assert [r.message for r in flaky.kept][:4] == ["a", "b", "c", "d"]
    assert flaky.kept[4].message.startswith("the database was away for ")  # type: ignore[union-attr]
    assert flaky.kept == list(journal.read(path))
    assert recorder.stored
    assert [line.split(":")[0] for line in told] == ["warning", "warning"]  # one line per change, not one per record


def test_progress_is_dropped_while_the_database_is_away(recorder, flaky) -> None:
    sign = Progress("r", "r/0", now(), "timing", 1, 2)
    recorder.progress(sign)
    flaky.error = AWAY
    recorder.progress(sign)
    recorder.progress(sign)
    assert flaky.beats == 1


def test_closing_waits_for_the_database_and_then_gives_up(recorder, flaky) -> None:
    flaky.error = AWAY
    recorder.write([note("a")])
    recorder.close(patience_s=0.2)
    assert not recorder.stored
    flaky.error = None
    recorder.close(patience_s=0.2)
    assert recorder.stored


def test_after_a_refusal_only_the_journal_is_written(recorder, flaky, told, path) -> None:
    flaky.error = StoreError("NSA_DATABASE_URL: 'x': refused the data")
    recorder.write([note("a")])
    recorder.write([note("b")])
    assert not recorder.stored
    kept = messages(path)
    assert (kept[0], kept[-1]) == ("a", "b")
    assert "no longer follows this run" in kept[1]
    assert len(told) == 1
