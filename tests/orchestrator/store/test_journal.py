"""The journal survives torn lines, full disks and second writers, and holds one run."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.store import journal
from orchestrator.store.journal import Journal, JournalError, JournalFull
from orchestrator.store.records import EventRecord, StartRecord


@contextmanager
def full_disk(path: Path, room: int = 10) -> Iterator[None]:
    """A context in which no file of this process can grow beyond the size of `path` and `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def note(message: str) -> EventRecord:
    return EventRecord(run_id="r", message=message)


def messages(path: Path) -> list[str]:
    return [record.message for record in journal.read(path) if isinstance(record, EventRecord)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / journal.NAME


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
