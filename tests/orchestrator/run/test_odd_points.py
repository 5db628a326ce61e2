"""A point that says odd things, and a disk that fills up, cost no other point and leave the run right."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pandas as pd

from jobs.schema.states import PointState
from orchestrator.report.summary import print_results
from orchestrator.run import driver
from orchestrator.run.progress import watcher
from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.journal import Journal, JournalFull
from orchestrator.store.records import MetricData, OutcomeRecord, StartRecord
from orchestrator.terminal import PlainConsole

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


def test_no_odd_point_costs_another(home, spec, database_url, new_database, monkeypatch, quick_probe, capsys) -> None:
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
    other = new_database()
    with Store.open(other) as store:
        importer.import_file(store, path)
    for url in (database_url, other):
        with Store.open(url) as store:
            found = queries.run(store, run_id)
            assert found is not None
            assert found["state"] == "done"
            assert list(queries.points(store, run_id)["state"]) == list(ODD.values())
            assert queries.measurements(store, run_ids=[run_id]).value.tolist() == [1.0, 1.0, 1.0, 1.0, 7.0]


def test_a_journal_whose_disk_is_full_in_mid_run_is_completed_by_a_resume(
    home, spec, tmp_path, quick_probe, monkeypatch, capsys
) -> None:
    full, append = tmp_path / "full", Journal.append

    def until_it_is_full(self: Journal, records) -> None:
        if full.exists():
            raise JournalFull("journal: 'x': cannot be written (No space left on device); free space there")
        append(self, records)

    monkeypatch.setattr(Journal, "append", until_it_is_full)
    assert run(spec("value = 1.0", f"open({str(full)!r}, 'w')", "value = 3.0")) == 1
    run_id = only_run(home)
    err = capsys.readouterr().err
    assert "cannot be written (No space left on device); free space there" in err
    assert f"--resume {run_id}" in err
    path = home / "artifacts" / run_id / journal.NAME
    assert sum(isinstance(record, OutcomeRecord) for record in journal.read(path)) < 3
    monkeypatch.setattr(Journal, "append", append)
    assert run("--resume", run_id) == 0
    ended = [record for record in journal.read(path) if isinstance(record, OutcomeRecord)]
    assert {record.point_id[-1] for record in ended} == {"0", "1", "2"}
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:
        assert list(queries.points(store, run_id)["state"]) == ["ok"] * 3


def test_a_disk_that_is_full_from_the_start_is_told_in_a_line(home, spec, quick_probe, monkeypatch, capsys) -> None:
    def full(self: Journal, records) -> None:
        raise JournalFull("journal: 'x': cannot be written (No space left on device); free space there")

    monkeypatch.setattr(Journal, "append", full)
    assert run(spec("value = 1.0")) == 1
    assert "cannot be written (No space left on device); free space there" in capsys.readouterr().err


def test_a_terminal_that_lacks_a_character_shows_its_code() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with watcher({"r/0": "é"}, 0, [], out) as watching:
        watching.ended(OutcomeRecord(run_id="r", point_id="r/0", attempt=1, state=PointState.ERROR, reason="日本"))
    out.seek(0)
    assert r"\xe9: \u65e5\u672c" in out.read()


def test_a_plain_number_has_no_unit(capsys) -> None:
    metrics = tuple(MetricData(name=name, unit=unit, value=1.0) for name, unit in (("a", "1"), ("b", "ms")))
    with watcher({"r/0": "p"}, 0, ["a", "b"], sys.stdout) as watching:
        watching.ended(OutcomeRecord(run_id="r", point_id="r/0", attempt=1, state=PointState.OK, metrics=metrics))
    assert "p: a 1, b 1 ms" in capsys.readouterr().out
    rows = [{"metric": one.name, "unit": one.unit, "value": 1.0, "label": "p"} for one in metrics]
    print_results(pd.DataFrame(rows), ["a", "b"], PlainConsole(file=sys.stdout))
    assert re.search(r"point +a +b \(ms\)", capsys.readouterr().out)


def test_a_time_is_told_as_it_is_said(capsys) -> None:
    metric = MetricData(name="planned_time", unit="h", value=0.215124)
    with watcher({"r/0": "p"}, 0, ["planned_time"], sys.stdout) as watching:
        watching.ended(OutcomeRecord(run_id="r", point_id="r/0", attempt=1, state=PointState.OK, metrics=(metric,)))
    assert "p: planned_time 12.9 min" in capsys.readouterr().out
    rows = [{"metric": "planned_time", "unit": "h", "value": 0.215124, "label": "p"}]
    print_results(pd.DataFrame(rows), ["planned_time"], PlainConsole(file=sys.stdout))
    assert re.search(r"point +planned_time\s+p +12.9 min", capsys.readouterr().out)
