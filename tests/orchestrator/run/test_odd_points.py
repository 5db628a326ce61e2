"""A point that says odd things, and a disk that fills up, cost no other point and leave the run right."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from jobs.schema.states import PointState
from orchestrator.run import driver
from orchestrator.run.progress import Watcher
from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import OutcomeRecord, StartRecord

RETURNS = "import jobs.snippet as s, jobs.schema.point as p; s.Measurement = lambda *a: p.Measurement"
ODD = {
    r"raise ValueError('caf\udcff \x00')": "error",
    "files['..'] = 'x'; files['good.txt'] = 'y'": "ok",
    r"beat('caf\udcff', 10**30, 10**30); import time; time.sleep(0.4)": "ok",
    rf"t, e={{'a': '\udcff'}}, {{'\udcff': [float('nan')]}}; {RETURNS}((s.Metric('time', 'ms', 1),), t, e, {{}})": "ok",
    f"{RETURNS}((s.Metric('time', 'ms', 1.0),) * 2, {{}}, {{}}, {{}})": "error",
    f"{RETURNS}((s.Metric('time', 'ms', 1.0),), {{}}, {{'gpu': {{'name': [1, chr(0)]}}, 'x': 10**400}}, {{}})": "ok",
    "value = 7.0": "ok",
}


def run(*args: str | Path) -> int:
    return driver.main(["--local", *map(str, args)])


def only_run(home: Path) -> str:
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    return path.parent.name


@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_no_odd_point_costs_another(home, spec, database_url, tmp_path, monkeypatch, quick_probe, capsys) -> None:
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    assert run(spec(*ODD)) == 1
    told = capsys.readouterr()
    assert told.err == ""
    assert "nsa import" not in told.out
    assert re.search(r"^warning: snippet 1: file not kept: '\.\.': is no plain file name", told.out, re.M)
    run_id = only_run(home)
    path = home / "artifacts" / run_id / journal.NAME
    assert run("--resume", run_id) == 1
    assert sum(isinstance(record, StartRecord) for record in journal.read(path)) == len(ODD)  # all are settled
    other = f"sqlite:///{tmp_path}/other.db"
    with Store.open(other) as store:
        importer.import_file(store, path)
    for url in (database_url, other):
        with Store.open(url) as store:
            found = queries.run(store, run_id)
            assert found is not None
            assert found["state"] == "done"
            assert list(queries.points(store, run_id)["state"]) == list(ODD.values())
            assert queries.measurements(store, run_ids=[run_id]).value.tolist() == [1.0, 1.0, 1.0, 1.0, 7.0]


def ended(state: PointState = PointState.OK, **fields: Any) -> OutcomeRecord:
    return OutcomeRecord(run_id="r", point_id="r/0", attempt=1, state=state, **fields)


def test_a_terminal_that_lacks_a_character_shows_its_code() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Watcher({"r/0": "é"}, 0, [], out) as watching:
        watching.ended(ended(PointState.ERROR, reason="日本"))
    out.seek(0)
    assert out.read() == "[1/1] error \\xe9: \\u65e5\\u672c\n"
