"""Live series of a real run: they grow in the database while it goes on, and outlive a database that is away."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quick_driver import COMMAND
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from orchestrator.store import Store, StoreError, importer, journal, queries, upgrade
from orchestrator.store.records import SeriesRecord

ROOT = Path(__file__).resolve().parents[3]
LEARNS = """
import time
for step in range(1, 131):
    beat("train", step, 130)
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
SPEC = """
kind: snippet
name: series
device: cpu
codes: {codes}
retries: 0
resources: {{workers: 1}}
deadlines: {{startup_s: 60, heartbeat_s: 20, point_s: 120}}
"""


@pytest.fixture
def run(tmp_path: Path, kinds_path: dict[str, str]):
    """Starts a driver with the quick probe on a database, with pieces of code as points; ends what is left."""
    started: list[subprocess.Popen] = []

    def begin(url: str, *codes: str) -> subprocess.Popen:
        (tmp_path / "spec.yaml").write_text(SPEC.format(codes=json.dumps(codes)))
        env = {**os.environ, **kinds_path, "NSA_HOME": str(tmp_path / "home"), "NSA_DATABASE_URL": url}
        command = [*COMMAND, str(tmp_path / "spec.yaml"), "--local"]
        with (tmp_path / "said.txt").open("w") as said:
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(found: Callable[[], int], more_than: int, seconds: float = 90) -> int:
    """The count once it is above `more_than`."""
    deadline = time.monotonic() + seconds
    while (count := found()) <= more_than:
        assert time.monotonic() < deadline, f"still {count}"
        time.sleep(0.2)
    return count


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


def test_series_grow_in_the_database_while_the_run_goes_on(run, tmp_path: Path) -> None:
    url, begun = f"sqlite:///{tmp_path / 'nsa.db'}", time.monotonic()
    process = run(url, LEARNS, KILLED, OLD)
    first = until(lambda: samples(url, "time", "running"), 0)
    until(lambda: samples(url, "time", "running"), first)
    assert samples(url, "resident_memory", "running") > 0
    assert process.wait(120) == 1, (tmp_path / "said.txt").read_text()
    seconds = time.monotonic() - begun
    kept = stored(url)
    assert kept == journalled(tmp_path / "home")
    with Store.open(url, create=False, readonly=True) as store:
        run_id = queries.runs(store).iloc[0]["run_id"]
        assert list(queries.points(store, run_id)["state"]) == ["ok", "crash", "ok"]
    learns = {step: value for (point, name, step), value in kept.items() if point.endswith("/0") and name == "time"}
    assert learns[130] == pytest.approx(1 / 130), "the last sample is always among them"
    assert 8 <= len(learns) <= min(65, seconds), "one sample a second, of up to ten"
    killed = [step for point, name, step in kept if point.endswith("/1") and name == "time"]
    assert len(killed) >= 2, "a killed point keeps its series"
    assert not [name for point, name, _ in kept if point.endswith("/2") and name == "time"]


@pytest.mark.postgres
def test_a_database_that_is_away_in_the_middle_loses_no_sample(run, tmp_path: Path, postgres: str, postgres_url: str):
    upgrade(postgres_url)
    name = make_url(postgres_url).database
    admin = create_engine(postgres, isolation_level="AUTOCOMMIT")

    def open_for_all(allowed: bool) -> None:
        with admin.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {str(allowed).lower()}"))
            ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
            connection.execute(text(ended), {"name": name})

    process = run(postgres_url, LEARNS)
    until(lambda: samples(postgres_url, "time", "running"), 1)
    said = tmp_path / "said.txt"
    open_for_all(False)
    until(lambda: "results go to the journal" in said.read_text(), False)
    open_for_all(True)
    admin.dispose()
    assert process.wait(120) == 0, said.read_text()
    assert "the database was away for" in said.read_text()
    kept = stored(postgres_url)
    assert kept == journalled(tmp_path / "home")
    assert len(kept) > 20
    [book] = (tmp_path / "home" / "artifacts").glob(f"*/{journal.NAME}")
    with Store.open(postgres_url) as store:
        importer.import_file(store, book)
    assert stored(postgres_url) == kept
