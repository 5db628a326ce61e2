"""A point that is measured again keeps its outcome until it has a new one, however the resume ends."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import wait_for

from orchestrator import provenance
from orchestrator.cli.cancel import cancel_run
from orchestrator.run import driver, plan
from orchestrator.settings import load_settings
from orchestrator.store import Store, exporter, importer, journal, queries

ROOT = Path(__file__).resolve().parents[3]
# Writes a line for each time that it is measured; waits, or ends as a file in the folder says.
CODE = """
folder = {0!r}
open(folder + '/log{1}', 'a').write('x')
while os.path.exists(folder + '/wait{1}'): beat('waits'); import time; time.sleep(0.05)
if os.path.exists(folder + '/fail{1}'): raise ValueError('bad day')
value = float(open(folder + '/value').read())
"""


# A driver as `python -m jobs`, but for the name of the sources and the real probe, which imports torch in a child.
DRIVER = """
import sys
from jobs.schema.point import Machine
from orchestrator import provenance
from orchestrator.run import driver
from orchestrator.execute.local import LocalExecutor

provenance.code_hash_of = lambda spec: {code!r}
LocalExecutor.probe = lambda self: {{None: Machine("cpu", "test", 8 << 30, {{"torch": "0"}})}}
sys.exit(driver.main(sys.argv[1:]))
"""

# The database's part is tried on both by the first test, and by those of the store.
ON_BOTH = pytest.mark.parametrize(
    ("new_database", "interrupted"), [("sqlite", "cancelled"), ("postgres", "killed")], indirect=["new_database"]
)
ON_SQLITE = pytest.mark.parametrize("new_database", ["sqlite"], indirect=True)


@pytest.fixture
def at(home: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of artifacts of runs that are stored in a database of each kind."""
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    (tmp_path / "value").write_text("1.5")
    return home / "artifacts"


@pytest.fixture
def run(
    quick_probe: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a driver to its end, as `start` does, but in this process; returns its exit code and what it told."""

    def whole(*args: str | Path, code: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(provenance, "code_hash_of", lambda spec: code)
            capsys.readouterr()
            return driver.main(["--local", *map(str, args)]), "".join(capsys.readouterr())

    return whole


@pytest.fixture
def codes(tmp_path: Path) -> list[str]:
    return [CODE.format(str(tmp_path), number) for number in range(2)]


def only_run(url: str) -> str:
    with Store.open(url, create=False) as store:
        [run_id] = queries.runs(store)["run_id"]
    return run_id


def points(url: str) -> list[tuple]:
    """State, attempt, value of each point, and the state of its latest attempt."""
    run_id = only_run(url)
    with Store.open(url, create=False) as store:
        rows = queries.points(store, run_id).to_dict("records")
        found = queries.measurements(store, run_ids=[run_id])
    values = dict(zip(found["point_id"], found["value"], strict=True))
    return [(row["state"], row["attempt"], values.get(row["point_id"]), row["again"] or row["state"]) for row in rows]


def same_elsewhere(at: Path, url: str, new_database: Callable[[], str]) -> None:
    """Check that the journal gives another database the same points, and the plan of a resume."""
    run_id = only_run(url)
    path = at / run_id / journal.NAME
    other = new_database()
    with Store.open(other) as store:
        importer.import_file(store, path)
        rebuilt = plan.history(exporter.records(store, run_id))
    assert points(other) == points(url)
    told = plan.history(journal.read(path))
    assert told is not None
    assert rebuilt is not None
    assert rebuilt.points == told.points


@ON_BOTH
def test_ok_points_keep_their_results_where_an_interrupted_resume_measures_them_again(
    at, spec, codes, run, start, tmp_path, database_url, new_database, interrupted: str
) -> None:
    code, told = run(spec(*codes), code="old")
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
    if interrupted == "killed":
        again.kill()
        again.wait()
        left = ["running", "pending"]
    else:
        again.terminate()
        told, _ = again.communicate(timeout=120)
        assert again.returncode == 130
        assert "2 points that had ended are measured again: the sources" in told
        assert "points that had ended before keep that outcome" in told
        left = ["cancelled", "cancelled"]
    assert points(database_url) == [(*old, state) for state in left]
    if interrupted == "killed":  # `nsa cancel` marks what its driver left
        with Store.open(database_url) as store:
            assert "marked 2 unfinished points" in cancel_run(load_settings(), store, run_id)
        assert points(database_url) == [(*old, "cancelled")] * 2
    same_elsewhere(at, database_url, new_database)

    shutil.rmtree(at)  # the database alone knows it now
    with Store.open(database_url) as store:
        exporter.export_journal(store, run_id, at / run_id / journal.NAME)
    (tmp_path / "wait0").unlink()
    code, told = run("--resume", run_id, code="new")
    assert code == 0, told
    assert "2 points that had ended are measured again: an earlier resume began to, and was interrupted" in told
    assert points(database_url) == [("ok", 3, 2.5, "ok")] * 2
    assert [(tmp_path / f"log{number}").read_text() for number in range(2)] == ["xxx", "xx"]


@ON_SQLITE
def test_a_new_failure_replaces_an_old_result(at, spec, codes, run, tmp_path, database_url, new_database) -> None:
    assert run(spec(*codes), code="old")[0] == 0
    (tmp_path / "fail0").touch()
    assert run("--resume", only_run(database_url), code="new")[0] == 1
    assert points(database_url) == [("error", 2, None, "error"), ("ok", 2, 1.5, "ok")]
    same_elsewhere(at, database_url, new_database)
