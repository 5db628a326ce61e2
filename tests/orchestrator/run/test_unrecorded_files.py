"""Files that a driver left without a record, killed between a point's outcome and its files, are found by a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.run import driver
from orchestrator.run.plan import history
from orchestrator.run.resume import unrecorded_files
from orchestrator.store import Store, journal, queries
from orchestrator.store.journal import Journal
from orchestrator.store.records import ArtifactRecord, EventRecord

FILES = "files = {'table.csv': 'a,b', 'notes.txt': 'x' * 70000}"


@pytest.fixture
def killed(home: Path, spec, quick_probe) -> Path:
    """The journal of a run of two points whose driver was killed before it recorded the files of the second."""
    assert driver.main(["--local", str(spec("pass", FILES))]) == 0
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    kept = list(journal.read(path))
    path.unlink()
    (home / "nsa.db").unlink()
    with Journal(path) as book:
        book.append([r for r in kept if not isinstance(r, ArtifactRecord) and r.type != "run_end"])
    return path


def test_they_are_recorded_as_they_would_have_been(home: Path, spec, quick_probe, killed: Path, capsys) -> None:
    run_id = killed.parent.name
    (killed.parent / "0001" / "1" / ".stderr.txt.part").write_text("torn")
    (killed.parent / "0001" / "checkpoints").mkdir()
    (killed.parent / "0001" / "checkpoints" / "manifest.json").write_text("{}")
    (killed.parent / "0007" / "1").mkdir(parents=True)
    (killed.parent / "0007" / "1" / "notes.txt").write_text("of no point")
    capsys.readouterr()
    assert driver.main(["--local", "--resume", run_id]) == 0
    said = "recorded now: notes.txt (attempt 1), table.csv (attempt 1); others may be lost"
    assert said in " ".join(capsys.readouterr().out.split())
    kept = list(journal.read(killed))
    files = {r.artifact.name: r for r in kept if isinstance(r, ArtifactRecord)}
    assert sorted(files) == ["notes.txt", "table.csv"]
    assert [(r.point_id, r.level) for r in kept if isinstance(r, EventRecord)] == [(f"{run_id}/1", "warning")]
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        rows = queries.artifacts(store, f"{run_id}/1").set_index("name")
    assert rows.loc["table.csv", "content"] == "a,b"
    assert (rows.loc["notes.txt", "size"], len(rows.loc["notes.txt", "content"])) == (70000, 65536)
    assert driver.main(["--local", "--resume", run_id]) == 0
    assert len([r for r in journal.read(killed) if isinstance(r, ArtifactRecord)]) == 2


def test_a_store_that_is_away_holds_nothing_up(killed: Path) -> None:
    known = history(journal.read(killed))
    assert known is not None
    [event] = unrecorded_files(known, "ftp://127.0.0.1:1/none")
    assert isinstance(event, EventRecord)
    assert event.message.startswith("not looked for files that no record names: ")


def test_a_file_that_cannot_be_read_is_told(killed: Path) -> None:
    table = killed.parent / "0001" / "1" / "table.csv"
    table.unlink()
    table.symlink_to("/etc/hostname")
    known = history(journal.read(killed))
    assert known is not None
    told = [
        record.message for record in unrecorded_files(known, f"file://{killed.parents[1]}") if record.type == "event"
    ]
    assert told[0].startswith("attempt 1: file in no record, and it cannot be read: ")
    assert told[1].startswith("the run's driver ended while files were kept: recorded now: notes.txt (attempt 1)")
