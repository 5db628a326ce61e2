"""Resuming by the journal, beside other drivers and into another database: no point is lost and none doubled."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import psutil
import pytest
from processes import descendants, wait_for
from typer.testing import CliRunner

from orchestrator.cli.cancel import CancelError, cancel_run
from orchestrator.cli.commands import app
from orchestrator.run import driver
from orchestrator.settings import load_settings
from orchestrator.store import Store, exporter, importer, journal, queries
from orchestrator.store.journal import Journal, JournalFull
from orchestrator.store.records import OutcomeRecord, Record

ROOT = Path(__file__).resolve().parents[3]
MARK = "open({0!r}, 'a').write('{1}\\n')"  # counts how often each point was measured
WAIT = "import time\nwhile not os.path.exists({0!r}): beat('waits'); time.sleep(0.05)\n"


@pytest.fixture
def at(home: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of artifacts of runs that are stored in a database of each kind."""
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    return home / "artifacts"


def stored(url: str, run_id: str) -> tuple[str, list[tuple[str, int]]]:
    """The run's state, and each point's state and attempt."""
    with Store.open(url, create=False) as store:
        row, points = queries.run(store, run_id), queries.points(store, run_id)
    assert row is not None
    return row["state"], list(zip(points["state"], points["attempt"], strict=True))


def runs_of(url: str) -> list[str]:
    with Store.open(url, create=False) as store:
        return list(queries.runs(store)["run_id"])


def only_run(url: str) -> str:
    [run_id] = runs_of(url)
    return run_id


def run(*args: str | Path) -> int:
    return driver.main(["--local", *map(str, args)])


def test_a_run_that_is_measured_is_left_alone_and_one_whose_driver_was_killed_is_resumed_by_one(
    at, spec, tmp_path, database_url, start, snippet_kind, capsys
) -> None:
    log, second = tmp_path / "measured", tmp_path / "second"
    codes = [MARK.format(str(log), i) + f"; value = {i}.5" for i in range(3)]
    codes[1] = WAIT.format(str(second)) + codes[1]
    first = start(spec(*codes))
    wait_for(lambda: log.exists() and bool(runs_of(database_url)), 60)  # the driver does not wait for the database
    run_id = only_run(database_url)
    wait_for(lambda: stored(database_url, run_id)[1][1:2] == [("running", 1)], 60)
    shutil.copytree(at / run_id, tmp_path / "elsewhere" / run_id)  # whose journal nobody has locked
    assert run("--resume", run_id) == 2
    assert "is being written by another process" in capsys.readouterr().err
    with Store.open(database_url) as store, pytest.raises(CancelError, match="its driver is alive"):
        cancel_run(load_settings(), store, run_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_ARTIFACTS", str(tmp_path / "elsewhere"))
        assert run("--resume", run_id) == 2
    assert f"run: {run_id!r}: is being measured by process {first.pid} on " in capsys.readouterr().err
    assert first.poll() is None
    [*_, child] = descendants(psutil.Process(first.pid), "orchestrator.execute.point:answer")
    first.kill()
    first.wait()
    assert psutil.wait_procs([child], timeout=30)[1] == []
    assert stored(database_url, run_id) == ("running", [("ok", 1), ("running", 1), ("pending", 0)])

    two = [start("--resume", run_id) for _ in range(2)]
    wait_for(lambda: any(process.poll() is not None for process in two), 60)
    refused, again = sorted(two, key=lambda process: process.poll() is None)
    assert refused.returncode == 2
    second.touch()
    told, _ = again.communicate()
    assert again.returncode == 0
    assert "settled: 1 ok" in told
    assert Counter(log.read_text().split()) == {"0": 1, "1": 1, "2": 1}
    assert stored(database_url, run_id) == ("done", [("ok", 1), ("ok", 2), ("ok", 1)])


def test_a_lost_journal_is_restored_by_hand(at, spec, tmp_path, database_url, quick_probe, capsys) -> None:
    log = tmp_path / "measured"
    fails = f"{MARK.format(str(log), 1)}\nif not os.path.exists({str(tmp_path / 'mended')!r}): raise ValueError"
    assert run(spec(MARK.format(str(log), 0), fails)) == 1
    run_id = only_run(database_url)
    shutil.rmtree(at)
    capsys.readouterr()
    assert run("--resume", run_id, "--retry-failed") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --resume: {run_id!r}: no journal of this run in {at}; there is none yet; ")
    restore = line.partition("nsa ")[2].split()
    assert CliRunner().invoke(app, restore).exit_code == 0
    again = CliRunner().invoke(app, restore)
    assert (again.exit_code, "exists; move it away first" in str(again.exception)) == (1, True)
    (tmp_path / "mended").touch()
    assert run("--resume", run_id, "--retry-failed") == 0
    assert Counter(log.read_text().split()) == {"0": 1, "1": 2}
    assert stored(database_url, run_id) == ("done", [("ok", 1), ("ok", 2)])


def test_a_full_disk_ends_the_run_and_a_resume_goes_on(
    at, spec, tmp_path, database_url, quick_probe, monkeypatch, capsys
) -> None:
    append = Journal.append

    def fails(book: Journal, records: list[Record]) -> None:
        if any(isinstance(record, OutcomeRecord) and record.point_id.endswith("/1") for record in records):
            raise JournalFull("journal: 'x': cannot be written (No space left on device); free space there")
        append(book, records)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", fails)
        assert run(spec("pass", "pass", "pass")) == 1
    run_id = only_run(database_url)
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "error: journal: 'x': cannot be written (No space left on device); free space there, then continue with: "
        f"python -m jobs --resume {run_id}"
    )
    assert stored(database_url, run_id)[0] == "running"
    assert run("--resume", run_id) == 0
    assert stored(database_url, run_id) == ("done", [("ok", 1), ("ok", 2), ("ok", 1)])


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
class TestRefused:
    """A resume that cannot be right ends with one line, before anything is measured."""

    def test_a_reported_run(self, at, database_url, snippet_kind, capsys) -> None:
        with Store.open(database_url) as store:
            importer.import_file(store, ROOT / "orchestrator" / "reference_data" / "peer_stages_h200.csv")
            run_id = only_run(database_url)
            exporter.export_journal(store, run_id, at / run_id / journal.NAME)
        assert run("--resume", run_id) == 2
        assert "was reported by others, not measured" in capsys.readouterr().err

    def test_another_runs_journal(self, at, spec, database_url, quick_probe, capsys) -> None:
        assert run(spec("pass")) == 0
        run_id = only_run(database_url)
        shutil.copytree(at / run_id, at / "20261120-120000-demo-abcd")
        before = stored(database_url, run_id)
        assert run("--resume", "20261120-120000-demo-abcd") == 2
        assert f"is of the run {run_id!r}" in capsys.readouterr().err
        assert stored(database_url, run_id) == before

    def test_a_journal_older_than_what_the_database_has(self, at, spec, database_url, quick_probe, capsys) -> None:
        assert run(spec("value = 1.5", "raise ValueError")) == 1
        run_id = only_run(database_url)
        path = at / run_id / journal.NAME
        older = path.read_bytes()
        cut = b"".join(older.splitlines(keepends=True)[:4])  # before the first attempt
        assert run("--resume", run_id, "--retry-failed") == 1
        newest = stored(database_url, run_id)
        for stale in (older, cut):
            path.write_bytes(stale)
            capsys.readouterr()
            assert run("--resume", run_id, "--retry-failed") == 2
            [line] = capsys.readouterr().err.splitlines()
            assert f"--resume: {run_id!r}: its journal is older than what " in line
            assert path.read_bytes() == stale
        path.unlink()
        assert CliRunner().invoke(app, line.partition("database: nsa ")[2].split()).exit_code == 0
        assert stored(database_url, run_id) == newest
        assert run("--resume", run_id, "--retry-failed") == 1
        assert stored(database_url, run_id)[1] == [("ok", 1), ("error", 3)]

    def test_a_journal_without_a_beginning(self, at, spec, database_url, quick_probe, capsys) -> None:
        assert run(spec("pass")) == 0
        path = at / only_run(database_url) / journal.NAME
        path.write_text(path.read_text().partition("\n")[2])
        assert run("--resume", path.parent.name) == 2
        assert "its journal ends before the run began; start a new run" in capsys.readouterr().err
