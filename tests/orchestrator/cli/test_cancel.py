"""`nsa cancel` of a run whose journal is another's, or cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nsa_command import Nsa

from orchestrator.store import Store, queries
from orchestrator.store.journal import Journal
from orchestrator.store.records import Record


@pytest.mark.parametrize("content", [None, b"", b"a torn line", b"no journal\n"])
def test_a_file_that_is_not_its_journal_stays_as_it_is(
    nsa: Nsa, home: Path, sweep: Callable[..., list[Record]], content: bytes | None
) -> None:
    """Its path comes with an imported journal, so it may be any. None: the journal of another run."""
    path = home / "other" / "journal.jsonl"
    first, *points = [r for r in sweep("r2", laws={"chunked": 1.0}) if r.type in ("run", "point")]
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        store.apply_many([first.model_copy(update={"artifacts": str(path.parent)}), *points])
    if content is None:
        with Journal(path) as journal:
            journal.append(sweep("r1"))
        content = path.read_bytes()
    else:
        path.parent.mkdir()
        path.write_bytes(content)
    done = nsa("cancel", "r2")
    assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
    assert "marked 4 unfinished points of r2 as cancelled in the database alone: " in done.out
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        assert set(queries.points(store, "r2")["state"]) == {"cancelled"}
    assert path.read_bytes() == content
