"""Live series of a real run: they grow in the database while it goes on, and outlive a database that is away."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import wait_for
from sqlalchemy import text

from orchestrator.store import Store, StoreError, journal, queries
from orchestrator.store.records import SeriesRecord

ROOT = Path(__file__).resolve().parents[3]
LEARNS = """
import time
for step in range(1, 81):
    beat("train", step, 80)
    beat.sample(step, {"time": 1 / step})
    time.sleep(0.1)
"""
KILLED = """
import time
for step in range(1, 30):
    beat("train")
    beat.sample(step, {"time": 2.0})
    time.sleep(0.1)
os.kill(os.getpid(), 9)
"""
OLD = """
def measure(beat):  # of another package: it knows beat as a plain call
    for done in range(3):
        beat("old", done, 3)
measure(beat)
"""


def samples(url: str, name: str, state: str | None = None) -> int:
    """The number of stored samples of a series; 0 if no point that has them is in this state."""
    try:
        with Store.open(url, create=False, readonly=True) as store, store.session() as session:
            query = "SELECT count(*) FROM v_series WHERE series = :name" + (" AND state = :state" if state else "")
            return int(session.execute(text(query), {"name": name, "state": state}).scalar_one())
    except StoreError:  # the run has not made it yet
        return 0


def journalled(home: Path) -> dict[tuple[str, str, int], float]:
    """The samples of a run's journal: (point, series, step) -> value."""
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    pieces = [record for record in journal.read(path) if isinstance(record, SeriesRecord)]
    assert len({(piece.point_id, piece.name, step) for piece in pieces for step in piece.steps}) == sum(
        len(piece.steps) for piece in pieces
    )
    return {
        (piece.point_id, piece.name, step): value
        for piece in pieces
        for step, value in zip(piece.steps, piece.values, strict=True)
    }


def stored(url: str) -> dict[tuple[str, str, int], float]:
    with Store.open(url, create=False, readonly=True) as store:
        run_id = queries.runs(store).iloc[0]["run_id"]
        return {
            (point, row["name"], row["step"]): row["value"]
            for point in queries.points(store, run_id)["point_id"]
            for row in queries.series(store, point).to_dict("records")
        }


def test_series_grow_in_the_database_while_the_run_goes_on(start, spec, home: Path) -> None:
    url, begun = f"sqlite:///{home / 'nsa.db'}", time.monotonic()
    process = start(spec(LEARNS, KILLED, OLD))
    for least in (1, 3):
        wait_for(lambda least=least: samples(url, "time", "running") >= least, 90, pause=0.2)
    assert samples(url, "resident_memory", "running") > 0
    assert process.wait(120) == 1, process.communicate()[0]
    seconds = time.monotonic() - begun
    kept = stored(url)
    assert kept == journalled(home)
    with Store.open(url, create=False, readonly=True) as store:
        run_id = queries.runs(store).iloc[0]["run_id"]
        assert list(queries.points(store, run_id)["state"]) == ["ok", "crash", "ok"]
    learns = {step: value for (point, name, step), value in kept.items() if point.endswith("/0") and name == "time"}
    assert learns[80] == pytest.approx(1 / 80), "the last sample is always among them"
    assert 7 <= len(learns) <= min(40, seconds), "one sample a second, of up to ten"
    killed = [step for point, name, step in kept if point.endswith("/1") and name == "time"]
    assert len(killed) >= 2, "a killed point keeps its series"
    assert not [name for point, name, _ in kept if point.endswith("/2") and name == "time"]
