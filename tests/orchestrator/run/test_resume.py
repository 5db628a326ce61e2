"""Resuming where the journal is gone, old, or of another database: no point is lost and none doubled."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from quick_driver import COMMAND
from waiting import wait_for

from orchestrator.cli.cancel import CancelError, cancel_run
from orchestrator.run import driver, plan
from orchestrator.settings import load_settings
from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import OutcomeRecord, PointRecord, RunRecord

ROOT = Path(__file__).resolve().parents[3]
MARK = "open({0!r}, 'a').write('{1}\\n')"  # counts how often each point was measured
WAIT = "import time\nwhile not os.path.exists({0!r}): beat('waits'); time.sleep(0.05)\n"


@pytest.fixture
def at(home: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of artifacts of runs that are stored in a database of each kind."""
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    return home / "artifacts"


@pytest.fixture
def processes(kinds_path: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m jobs --local` with the settings of this process and the quick probe; ends what is left."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str | Path) -> subprocess.Popen[str]:
        command = [*COMMAND, "--local", *map(str, args)]
        env = {**os.environ, **kinds_path}
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


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


def test_a_run_whose_disk_is_lost_in_mid_run_is_resumed_from_the_database(
    at, spec, tmp_path, database_url, new_database, processes, snippet_kind, capsys
) -> None:
    """Its driver goes on without the folder, guards the run without the journal, and is killed."""
    log, second, third = tmp_path / "measured", tmp_path / "second", tmp_path / "third"
    codes = [MARK.format(str(log), i) + f"; value = {i}.5" for i in range(4)]
    codes[1] = WAIT.format(str(second)) + codes[1]
    codes[2] = WAIT.format(str(third)) + codes[2]
    path = spec(*codes)
    first = processes(path)
    wait_for(lambda: log.exists() and bool(runs_of(database_url)), 60)  # the driver does not wait for the database
    run_id = only_run(database_url)
    wait_for(lambda: stored(database_url, run_id)[1][1] == ("running", 1), 60)

    shutil.rmtree(at)
    second.touch()
    wait_for(lambda: [state for state, _ in stored(database_url, run_id)[1]] == ["ok", "ok", "running", "pending"], 60)
    assert run("--resume", run_id) == 2
    assert f"--resume: {run_id!r}: is being measured by another process" in capsys.readouterr().err
    with Store.open(database_url) as store, pytest.raises(CancelError, match="its driver is alive"):
        cancel_run(load_settings(), store, run_id)
    assert first.poll() is None
    first.kill()
    first.wait()
    assert stored(database_url, run_id) == ("running", [("ok", 1), ("ok", 1), ("running", 1), ("pending", 0)])
    shutil.rmtree(at, ignore_errors=True)

    two = [processes("--resume", run_id) for _ in range(2)]
    wait_for(lambda: any(process.poll() is not None for process in two), 60)
    refused, again = sorted(two, key=lambda process: process.poll() is None)
    assert refused.returncode == 2
    third.touch()
    told, _ = again.communicate()
    assert again.returncode == 0
    assert f"journal: {at / run_id / journal.NAME} is gone; rebuilt from " in told
    assert "settled: 2 ok" in told
    assert Counter(log.read_text().split()) == {"0": 1, "1": 1, "2": 1, "3": 1}
    done = ("done", [("ok", 1), ("ok", 1), ("ok", 2), ("ok", 1)])
    assert stored(database_url, run_id) == done

    other = new_database()  # the rebuilt journal is a whole one
    with Store.open(other) as store:
        importer.import_file(store, at / run_id / journal.NAME)
    assert stored(other, run_id) == done


def test_a_run_resumed_into_an_empty_database_is_complete_there(
    at, spec, tmp_path, database_url, new_database, quick_probe, monkeypatch
) -> None:
    path = spec("value = 1.5", f"if not os.path.exists({str(tmp_path / 'mended')!r}): raise ValueError", "value = 3.5")
    assert run(path) == 1
    run_id = only_run(database_url)
    (tmp_path / "mended").touch()
    other = new_database()
    monkeypatch.setenv("NSA_DATABASE_URL", other)
    assert run("--resume", run_id, "--retry-failed") == 0
    assert stored(other, run_id) == ("done", [("ok", 1), ("ok", 2), ("ok", 1)])
    with Store.open(other) as store:
        assert queries.measurements(store, run_ids=[run_id]).value.tolist() == [1.5, 1.0, 3.5]


def test_an_old_copy_of_a_journal_measures_nothing_again(
    at, spec, tmp_path, database_url, quick_probe, monkeypatch, capsys
) -> None:
    """The run went on elsewhere, on another disk, and comes back."""
    log = tmp_path / "measured"
    fails = f"{MARK.format(str(log), 1)}\nif not os.path.exists({str(tmp_path / 'mended')!r}): raise ValueError"
    assert run(spec(MARK.format(str(log), 0), fails)) == 1
    run_id = only_run(database_url)
    (tmp_path / "mended").touch()
    monkeypatch.setenv("NSA_ARTIFACTS", str(tmp_path / "elsewhere"))
    assert run("--resume", run_id, "--retry-failed") == 0
    monkeypatch.delenv("NSA_ARTIFACTS")
    capsys.readouterr()
    assert run("--resume", run_id, "--retry-failed") == 0
    assert f"journal: {at / run_id / journal.NAME} lacked records that " in capsys.readouterr().out
    assert Counter(log.read_text().split()) == {"0": 1, "1": 2}
    assert stored(database_url, run_id) == ("done", [("ok", 1), ("ok", 2)])
    kept = list(journal.read(at / run_id / journal.NAME))
    assert [r.resumed for r in kept if isinstance(r, RunRecord)][-1] == 2
    found = plan.history(kept)
    assert found is not None
    assert [(p.state, p.attempt) for p in found.points.values()] == [("ok", 1), ("ok", 2)]


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("lost", ["the beginning", "a point's plan", "all but the torn last line"])
def test_a_journal_that_lost_lines_is_completed_from_the_database(
    at, spec, tmp_path, database_url, quick_probe, capsys, lost: str
) -> None:
    log = tmp_path / "measured"
    fails = f"{MARK.format(str(log), 1)}\nif not os.path.exists({str(tmp_path / 'mended')!r}): raise ValueError"
    assert run(spec(MARK.format(str(log), 0), fails)) == 1
    run_id = only_run(database_url)
    assert run("--resume", run_id) == 1
    path = at / run_id / journal.NAME
    lines = path.read_text().splitlines(keepends=True)
    kept = {"the beginning": lines[1:], "a point's plan": [lines[0], *lines[2:]]}
    path.write_text("".join(kept.get(lost, [lines[-1][:20]])))
    (tmp_path / "mended").touch()
    capsys.readouterr()
    assert run("--resume", run_id, "--retry-failed") == 0
    assert f"journal: {path} lacked records that " in capsys.readouterr().out
    assert Counter(log.read_text().split()) == {"0": 1, "1": 2}
    assert stored(database_url, run_id) == ("done", [("ok", 1), ("ok", 2)])


def test_a_resumed_journal_that_agrees_with_the_database_is_not_rewritten(
    at, spec, database_url, quick_probe, capsys
) -> None:
    assert run(spec("pass", "raise ValueError")) == 1
    run_id = only_run(database_url)
    capsys.readouterr()
    assert run("--resume", run_id) == 1
    assert "journal: " not in capsys.readouterr().out
    outcomes = [r for r in journal.read(at / run_id / journal.NAME) if isinstance(r, OutcomeRecord)]
    assert len(outcomes) == 2


def test_a_run_cancelled_without_its_journal_is_resumed(at, spec, tmp_path, database_url, quick_probe) -> None:
    log = tmp_path / "measured"
    assert run(spec(MARK.format(str(log), 0), f"{MARK.format(str(log), 1)}; raise ValueError")) == 1
    run_id = only_run(database_url)
    kept = [
        record
        for record in journal.read(at / run_id / journal.NAME)
        if isinstance(record, RunRecord | PointRecord) or getattr(record, "point_id", None) == f"{run_id}/0"
    ]
    shutil.rmtree(at)
    with Store.open(database_url) as store:
        with store.session(writes=True) as session:
            session.connection().exec_driver_sql("DELETE FROM run")
        store.apply_many(kept)  # as if the driver had died before the second point
        assert "marked 1 unfinished points" in cancel_run(load_settings(), store, run_id)
    assert not at.exists()
    assert run("--resume", run_id) == 1
    assert Counter(log.read_text().split()) == {"0": 1, "1": 2}
    assert stored(database_url, run_id) == ("done", [("ok", 1), ("error", 1)])


def test_a_run_of_which_nothing_is_kept_is_named_with_both_places(at, database_url, snippet_kind, capsys) -> None:
    at.mkdir(parents=True)
    assert run("--resume", "20261120-120000-demo-abcd") == 2
    [line] = capsys.readouterr().err.splitlines()
    database = "nsa.db" if database_url.startswith("sqlite") else "postgresql+psycopg://"
    assert line.startswith(f"error: --resume: '20261120-120000-demo-abcd': no such run in {at} nor in ")
    assert database in line
    assert list(at.iterdir()) == []


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
class TestRefused:
    """A resume that cannot be right ends with one line, before anything is measured."""

    def test_without_journal_and_database(self, at, spec, database_url, quick_probe, monkeypatch, capsys) -> None:
        assert run(spec("pass")) == 0
        run_id = only_run(database_url)
        shutil.rmtree(at)
        monkeypatch.setenv("NSA_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
        assert run("--resume", run_id) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --resume: {run_id!r}: has no journal in {at}, and the database cannot be asked")

    def test_a_reported_run(self, at, database_url, snippet_kind, capsys) -> None:
        with Store.open(database_url) as store:
            importer.import_file(store, ROOT / "orchestrator" / "reference_data" / "peer_stages_h200.csv")
        assert run("--resume", only_run(database_url)) == 2
        assert "was reported by others, not measured" in capsys.readouterr().err

    def test_another_runs_journal(self, at, spec, database_url, quick_probe, capsys) -> None:
        assert run(spec("pass")) == 0
        run_id = only_run(database_url)
        shutil.copytree(at / run_id, at / "20261120-120000-demo-abcd")
        before = stored(database_url, run_id)
        assert run("--resume", "20261120-120000-demo-abcd") == 2
        assert f"is of the run {run_id!r}" in capsys.readouterr().err
        assert stored(database_url, run_id) == before

    def test_a_database_with_another_run_of_the_same_id(self, at, spec, database_url, quick_probe, capsys) -> None:
        assert run(spec("pass")) == 0
        run_id = only_run(database_url)
        with Store.open(database_url) as store, store.session(writes=True) as session:
            session.connection().exec_driver_sql("UPDATE run SET created_at = '2020-01-01 00:00:00.000000'")
        assert run("--resume", run_id) == 2
        assert f"is of another run than the {run_id!r} in " in capsys.readouterr().err

    def test_a_journal_that_lost_a_plan_into_an_empty_database(
        self, at, spec, database_url, new_database, quick_probe, monkeypatch, capsys
    ) -> None:
        assert run(spec("pass", "pass")) == 0
        run_id = only_run(database_url)
        path = at / run_id / journal.NAME
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([lines[0], *lines[2:]]))
        monkeypatch.setenv("NSA_DATABASE_URL", other := new_database())
        assert run("--resume", run_id) == 2
        assert f"point: '{run_id}/0' is not in the database" in capsys.readouterr().err
        with Store.open(other) as store:
            assert queries.runs(store).empty
