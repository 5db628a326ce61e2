"""`nsa cancel` of a run whose journal is another's, or cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nsa_command import Nsa

from orchestrator.store import Store, queries
from orchestrator.store.journal import Journal
from orchestrator.store.records import Record


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


@pytest.fixture
def cancelled(nsa: Nsa, home: Path) -> Callable[[str], None]:
    """Cancels `r2`, and checks that it is done in the database alone, with a line that says why."""

    def check(why: str) -> None:
        done = nsa("cancel", "r2")
        assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
        assert f"marked 4 unfinished points of r2 as cancelled in the database alone: {why}" in done.out
        assert len(done.out) < 1500
        assert states(home) == {"cancelled"}

    return check


def write(path: Path, records: list[Record]) -> bytes:
    with Journal(path) as journal:
        journal.append(records)
    return path.read_bytes()


def states(home: Path) -> set[str]:
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        return set(queries.points(store, "r2")["state"])


@pytest.mark.parametrize("content", [None, b"", b"a torn line", b"no journal\n"])
def test_a_file_that_is_not_its_journal_stays_as_it_is(
    home: Path, sweep, stored, cancelled, content: bytes | None
) -> None:
    """Its path comes with an imported journal, so it may be any. None: the journal of another run."""
    path = home / "other" / "journal.jsonl"
    stored(path.parent)
    if content is None:
        content = write(path, sweep("r1"))
        cancelled(f"{path} is of the run 'r1', so it stays as it is")
    else:
        path.parent.mkdir()
        path.write_bytes(content)
        cancelled("")
    assert path.read_bytes() == content
