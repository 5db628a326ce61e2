"""`nsa artifacts` and the doctor's check of the store: what is copied, and what a hostile database cannot reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nsa_command import Nsa
from sqlalchemy import event

from orchestrator.cli import doctor
from orchestrator.execute.artifacts import ArtifactStore, Source, stored_files
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.records import ArtifactData, ArtifactRecord

RUN = "20261120-120000-demo-abcd"


def test_artifacts_lists_and_copies_what_is_there_and_names_where_the_rest_is(
    nsa: Nsa, home: Path, sweep: Callable[..., list]
) -> None:
    record = stored_file(home, sweep, "note.txt", "whole text\n")
    code, out, err = nsa("artifacts", RUN, "--point", "1")
    assert code == 0
    assert "note.txt" in out
    assert record.sha256 in out.replace("\n", "")
    code, out, err = nsa("artifacts", RUN, "--out", str(home / "copies"))
    assert code == 1
    assert (home / "copies" / "0001" / "1" / "note.txt").read_text() == "whole text\n"
    assert "copied 1 of 9 files" in out  # the sweep's own files are on another host
    missing = err.splitlines()
    assert len(missing) == 8
    assert all("is not in the artifact store" in line and "(host bench1)" in line for line in missing)


def test_the_files_of_all_points_are_read_at_once(sqlite_store: Store, sweep: Callable[..., list]) -> None:
    sqlite_store.apply_many(sweep(RUN))
    asked: list[str] = []
    event.listen(sqlite_store.engine, "before_cursor_execute", lambda _, __, statement, *___: asked.append(statement))
    found = stored_files(sqlite_store, RUN, None)
    assert [(file.point, file.name) for file in found] == [(number, "stdout.txt") for number in range(8)]
    assert len([statement for statement in asked if statement.startswith("SELECT")]) == 1
    assert stored_files(sqlite_store, RUN, 3) == [found[3]]


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "http://127.0.0.1:1/x"])
def test_a_hostile_path_in_the_database_is_not_opened(
    nsa: Nsa, home: Path, sweep: Callable[..., list], path: str
) -> None:
    (home / "secret").write_text("whole text\n")
    stored_file(home, sweep, "note.txt", "whole text\n", path=path)
    code, _out, err = nsa("artifacts", RUN, "--point", "1", "--out", str(home / "copies"))
    assert code == 1
    assert "is no path below the artifact store; it was not opened" in err
    assert not list((home / "copies").rglob("note.txt"))


def test_a_hostile_name_in_the_database_writes_no_file(nsa: Nsa, home: Path, sweep: Callable[..., list]) -> None:
    stored_file(home, sweep, "../../escaped.txt", "whole text\n", path="r/0001/1/note.txt")
    code, _out, err = nsa("artifacts", RUN, "--point", "1", "--out", str(home / "a" / "b" / "copies"))
    assert code == 1
    assert "is no plain file name" in err
    assert not list(home.rglob("escaped.txt"))


def test_a_hostile_name_is_shown_as_text(nsa: Nsa, home: Path, sweep: Callable[..., list]) -> None:
    stored_file(home, sweep, "\x1b[31mred\nline", "whole text\n")
    for args in (("artifacts", RUN), ("logs", RUN, "--point", "1"), ("show", RUN, "--point", "1")):
        out = nsa(*args)[1]
        assert r"\x1b[31mred\nline" in out
        assert "\x1b" not in out


def stored_file(home: Path, sweep: Callable[..., list], name: str, text: str, path: str | None = None) -> ArtifactData:
    """A file of the second point of a stored sweep, whose row may be hostile."""
    store = ArtifactStore(f"file://{home / 'artifacts'}")
    file = store.put(Source("note.txt", text), "r/0001/1/note.txt")
    file = file.model_copy(update={"name": name, "path": path or file.path})
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as opened:
        opened.apply_many(sweep(RUN))
        opened.apply(ArtifactRecord(run_id=RUN, point_id=f"{RUN}/1", attempt=1, artifact=file))
    return file


def test_doctor_says_where_the_store_is_and_whether_it_can_be_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at() -> doctor.Finding:
        return next(finding for finding in doctor.findings(Settings()) if finding.name == "artifact store")

    assert str(home / "artifacts") in looked_at().detail
    monkeypatch.setenv("NSA_ARTIFACT_STORE", str(home / "store"))
    assert (looked_at().health, looked_at().detail) == (doctor.Health.OK, f"file://{home}/store, can be written")
    assert not list((home / "store").iterdir())
    monkeypatch.setenv("NSA_ARTIFACT_STORE", "ftp://127.0.0.1:1/store")
    assert looked_at().health is doctor.Health.BROKEN
    assert "cannot be reached" in looked_at().detail
