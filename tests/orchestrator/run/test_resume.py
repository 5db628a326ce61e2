"""Resuming by the journal and beside other drivers: no point is lost and none doubled; one that is measured again keeps
its outcome until it has a new one, however the resume ends."""

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from processes import descendants, wait_for
from typer.testing import CliRunner

from orchestrator import provenance
from orchestrator.cli.commands import app
from orchestrator.cli.submission import cancel_run
from orchestrator.errors import UserError
from orchestrator.run import driver
from orchestrator.settings import load_settings
from orchestrator.store import Store, exporter, importer, journal, queries
from orchestrator.store.journal import Journal, JournalFull
from orchestrator.store.records import OutcomeRecord, Record

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


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
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
    with Store.open(database_url) as store, pytest.raises(UserError, match="its driver is alive"):
        cancel_run(load_settings(), store, run_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSA_ARTIFACTS", str(tmp_path / "elsewhere"))
        assert run("--resume", run_id) == 2
    assert f"run: {run_id!r}: is being measured by process {first.pid} on " in capsys.readouterr().err
    assert first.poll() is None
    measuring = partial(descendants, psutil.Process(first.pid), "orchestrator.execute.point:answer")
    wait_for(lambda: bool(measuring()), 60)  # a point is recorded as running before its process begins
    [*_, child] = measuring()
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


@pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)
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
        assert run("--resume", run_id, "--retry-failed") == 2
        lost = capsys.readouterr().err
        assert lost.startswith(f"error: --resume: {run_id!r}: no journal of this run in {at}; there is none yet; ")
        restore = line.partition("database: nsa ")[2].split()
        assert restore == lost.partition("nsa ")[2].split()
        assert CliRunner().invoke(app, restore).exit_code == 0
        again = CliRunner().invoke(app, restore)
        assert (again.exit_code, "exists; move it away first" in str(again.exception)) == (1, True)
        assert stored(database_url, run_id) == newest
        assert run("--resume", run_id, "--retry-failed") == 1
        assert stored(database_url, run_id)[1] == [("ok", 1), ("error", 3)]


# Measured again

# Writes a line for each time that it is measured; waits while a file is in the folder.
CODE = """
folder = {0!r}
open(folder + '/log{1}', 'a').write('x')
while os.path.exists(folder + '/wait{1}'): beat('waits'); import time; time.sleep(0.05)
value = float(open(folder + '/value').read())
"""


# A driver as `python -m jobs`, but for the name of the sources and the real probe, which imports torch in a child.
DRIVER = """
import sys
from jobs.schema.point import Machine
from orchestrator import provenance
from orchestrator.run import driver
from orchestrator.execute.local import LocalExecutor

provenance.code_hash = lambda spec: {code!r}
LocalExecutor.probe = lambda self: {{None: Machine("cpu", "test", 8 << 30, {{"torch": "0"}})}}
sys.exit(driver.main(sys.argv[1:]))
"""


@pytest.fixture
def at_code(
    quick_probe: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a driver to its end in this process, the sources called `code`; returns its exit code and what it told."""

    def whole(*args: str | Path, code: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(provenance, "code_hash", lambda spec: code)
            capsys.readouterr()
            return driver.main(["--local", *map(str, args)]), "".join(capsys.readouterr())

    return whole


def points(url: str) -> list[tuple]:
    """State, attempt, value of each point, and the state of its latest attempt."""
    run_id = only_run(url)
    with Store.open(url, create=False) as store:
        rows = queries.points(store, run_id).to_dict("records")
        found = queries.measurements(store, run_ids=[run_id])
    values = dict(zip(found["point_id"], found["value"], strict=True))
    return [(row["state"], row["attempt"], values.get(row["point_id"]), row["again"] or row["state"]) for row in rows]


@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_ok_points_keep_their_results_where_an_interrupted_resume_measures_them_again(
    at, spec, at_code, start, tmp_path, database_url, new_database
) -> None:
    (tmp_path / "value").write_text("1.5")
    code, told = at_code(spec(*(CODE.format(str(tmp_path), number) for number in range(2))), code="old")
    assert code == 0, told
    run_id, old = only_run(database_url), ("ok", 1, 1.5)
    assert points(database_url) == [(*old, "ok")] * 2
    (tmp_path / "wait0").touch()
    (tmp_path / "value").write_text("2.5")
    again = start("--resume", run_id, command=[sys.executable, "-c", DRIVER.format(code="new")])
    wait_for(lambda: points(database_url) == [(*old, "running"), (*old, "pending")], 60)
    wait_for(lambda: (tmp_path / "log0").read_text() == "xx", 60)
    with Store.open(database_url, create=False) as store:
        row = queries.run(store, run_id)
    assert row is not None
    assert (row["ok"], row["again"], row["points"], row["running"], row["pending"]) == (2, 2, 2, 0, 0)
    again.kill()
    again.wait()
    assert points(database_url) == [(*old, "running"), (*old, "pending")]
    with Store.open(database_url) as store:  # `nsa cancel` marks what its driver left
        assert "marked 2 unfinished points" in cancel_run(load_settings(), store, run_id)
    assert points(database_url) == [(*old, "cancelled")] * 2
    other = new_database()
    with Store.open(other) as store:
        importer.import_file(store, at / run_id / journal.NAME)
    assert points(other) == points(database_url)

    shutil.rmtree(at)  # the database alone knows it now
    with Store.open(database_url) as store:
        exporter.export_journal(store, run_id, at / run_id / journal.NAME)
    (tmp_path / "wait0").unlink()
    code, told = at_code("--resume", run_id, code="new")
    assert code == 0, told
    assert points(database_url) == [("ok", 3, 2.5, "ok")] * 2
    assert [(tmp_path / f"log{number}").read_text() for number in range(2)] == ["xxx", "xx"]
