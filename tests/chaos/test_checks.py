"""The checks of a chaos run find what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos import checks
from chaos.sweep import Sweep, value

from jobs.schema.states import PointState, RunState
from orchestrator.store import Store, journal
from orchestrator.store import records as rec

POINTS = 3


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep("sweep1", tmp_path, POINTS, 0.1)


@pytest.fixture
def kept(sweep: Sweep, tmp_path: Path) -> Callable[[list[rec.Record]], list[str]]:
    """Function from the records of the journal and of the database to what is wrong with them."""

    def check(records: list[rec.Record], stored: list[rec.Record] | None = None) -> list[str]:
        path = tmp_path / "home" / "artifacts" / records[0].run_id / journal.NAME
        with journal.Journal(path) as book:
            book.append(records)
        with Store.open(f"sqlite:///{tmp_path / 'nsa.db'}") as store:
            store.apply_many(records if stored is None else stored)
        return list(checks.accounts(sweep, f"sqlite:///{tmp_path / 'nsa.db'}", tmp_path))

    return check


def run(*ends: tuple[int, int, PointState, float]) -> list[rec.Record]:
    """Records of a run whose attempts (point, attempt, state, value) ended so."""
    run_id = "20261120-120000-sweep1-abcd"
    records: list[rec.Record] = [
        rec.RunRecord(run_id=run_id, name="sweep1", kind="snippet", spec={}, spec_hash="0" * 16, host="h")
    ]
    for number in range(POINTS):
        config, axes = {"code": ""}, {"implementation": "snippet", "device": "cpu"}
        planned = {"index": number, "key": f"{number}", "label": f"snippet {number}", "config": config, "axes": axes}
        records.append(rec.PointRecord(run_id=run_id, point_id=f"{run_id}/{number}", **planned))
    for number, attempt, state, found in ends:
        of = {"run_id": run_id, "point_id": f"{run_id}/{number}", "attempt": attempt}
        metrics = (rec.MetricData(name="time", unit="ms", value=found),) if state is PointState.OK else ()
        records.append(rec.StartRecord(**of, node="h"))
        records.append(rec.OutcomeRecord(**of, state=state, metrics=metrics))
    return [*records, rec.RunEndRecord(run_id=run_id, state=RunState.DONE)]


OK, LOST = PointState.OK, PointState.LOST
GOOD = [(number, 1, OK, value(number)) for number in range(POINTS)]


def test_points_that_are_ok_once_are_accounted_for(kept) -> None:
    assert kept(run(GOOD[0], (1, 1, LOST, 0), (1, 2, OK, value(1)), GOOD[2])) == []


@pytest.mark.parametrize(
    ("ends", "fault"),
    [
        ([*GOOD[:2]], "/2: the journal has the ok attempts {}"),
        ([*GOOD, (1, 2, OK, value(1))], "/1: was measured again after it was ok"),
        ([*GOOD, (1, 2, LOST, 0)], "/1: was measured again after it was ok"),
        ([GOOD[0], (1, 1, OK, value(2)), GOOD[2]], "/1: the journal has the ok attempts {1: 2.5}, not one of 1.5"),
    ],
)
def test_a_point_that_is_not_ok_once_is_found(kept, ends, fault: str) -> None:
    assert any(fault in line for line in kept(run(*ends)))


def test_a_database_that_lacks_an_outcome_is_found(kept) -> None:
    records = run(*GOOD)
    lacks = [r for r in records if not (isinstance(r, rec.OutcomeRecord) and r.point_id.endswith("/2"))]
    found = kept(records, lacks)
    assert any("the database has points {'ok': 2, 'running': 1}, not 3 ok" in line for line in found)
    assert any("the database has 2 values, not each of the 3 once" in line for line in found)


def test_a_process_that_left_its_parent_is_found() -> None:
    mark = f"CHAOS_TEST={os.getpid()}"
    code = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    name, found = mark.split("=")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, name: found}, check=True)
    left = checks.marked(mark)
    assert [process.name() for process in left] == ["sleep"]
    assert any("sleep 60" in line for line in checks.processes(mark))
    for process in left:
        process.kill()


def test_a_driver_with_a_traceback_or_a_strange_end_is_found(sweep: Sweep) -> None:
    sweep.codes += [0, 3]
    sweep.log(0).write_text("Traceback (most recent call last):\n")
    assert len(list(checks.drivers(sweep))) == 2
