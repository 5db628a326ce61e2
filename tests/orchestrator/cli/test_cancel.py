"""`nsa cancel` of a run whose journal is another's, or cannot be used."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from nsa_command import Nsa

from orchestrator.journal import Journal
from orchestrator.records import Record
from orchestrator.store import Store, queries


@pytest.fixture
def stored(home: Path, sweep: Callable[..., list[Record]]) -> Callable[[Path | str], list[Record]]:
    """Stores an unfinished run `r2` whose journal the database expects in a folder; returns its records."""

    def store_in(folder: Path | str) -> list[Record]:
        records = [r for r in sweep("r2", laws={"chunked": 1.0}) if r.type in ("run", "point")]
        records[0] = records[0].model_copy(update={"artifacts": str(folder)})
        with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
            store.apply_many(records)
        return records

    return store_in


def write(path: Path, records: list[Record]) -> bytes:
    with Journal(path) as journal:
        journal.append(records)
    return path.read_bytes()


def states(home: Path) -> set[str]:
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        return set(queries.points(store, "r2")["state"])


def test_the_journal_of_another_run_stays_as_it_is(nsa: Nsa, home: Path, sweep, stored) -> None:
    """Its path comes with an imported journal, so it may be any."""
    path = home / "other" / "journal.jsonl"
    stored(path.parent)
    before = write(path, sweep("r1"))
    done = nsa("cancel", "r2")
    assert (done.code, done.err) == (0, "")
    assert f"in the database alone: {path} is of the run 'r1', so it stays as it is" in done.out
    assert done.out.count("\n") == 1
    assert path.read_bytes() == before
    assert states(home) == {"cancelled"}


@pytest.mark.parametrize("content", [b"", b"a torn line", b"no journal\n"])
def test_a_file_that_is_no_journal_stays_as_it_is(nsa: Nsa, home: Path, stored, content: bytes) -> None:
    path = home / "other" / "journal.jsonl"
    stored(path.parent)
    path.parent.mkdir()
    path.write_bytes(content)
    done = nsa("cancel", "r2")
    assert (done.code, "in the database alone" in done.out, done.out.count("\n")) == (0, True, 1)
    assert path.read_bytes() == content
    assert states(home) == {"cancelled"}


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every file read-only, also for root."""
    opened = Path.open

    def refuse(path: Path, mode: str = "r", *args, **kwargs):
        if mode.strip("bt") != "r":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, mode, *args, **kwargs)

    return lambda: monkeypatch.setattr(Path, "open", refuse)


def test_a_journal_that_cannot_be_written_is_no_sign_of_a_driver(nsa: Nsa, home: Path, stored, read_only) -> None:
    path = home / "own" / "journal.jsonl"
    before = write(path, stored(path.parent))
    read_only()
    done = nsa("cancel", "r2")
    assert (done.code, done.err) == (0, "")
    assert f"marked 4 unfinished points of r2 as cancelled in the database alone: {path} cannot be" in done.out
    assert path.read_bytes() == before
    assert states(home) == {"cancelled"}


def test_the_lock_of_a_journal_that_cannot_be_written_is_seen(nsa: Nsa, home: Path, stored, read_only) -> None:
    path = home / "own" / "journal.jsonl"
    write(path, stored(path.parent))
    with Journal(path):
        read_only()
        done = nsa("cancel", "r2")
    assert (done.code, "its driver is alive" in done.err) == (2, True)
    assert states(home) == {"pending"}
