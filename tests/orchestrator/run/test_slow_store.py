"""A database that is locked or frozen: points are measured as before, and the driver can be ended."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import OutcomeRecord, RunEndRecord

POINTS = 60


@pytest.fixture
def sweep(start, spec, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], subprocess.Popen[str]]:
    """Function that starts a driver in its own process, which measures many short points."""
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    return lambda: start(spec(*["value = 1.0"] * POINTS))


def read_to(process: subprocess.Popen[str], found: Callable[[str], bool]) -> list[str]:
    """The lines of a process up to the one that is looked for."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if found(line):
            return lines
    raise AssertionError("\n".join(lines))


def test_a_database_that_does_not_answer_stalls_no_point_and_no_end(sweep, frozen, store: Store, home: Path) -> None:
    driver = sweep()
    begun = read_to(driver, lambda line: line.startswith("[2/"))
    run_id = begun[0].removeprefix("run ").split(":")[0]
    path = home / "artifacts" / run_id / journal.NAME
    with frozen():
        meanwhile = read_to(driver, lambda line: "results go to the journal" in line)
        assert "has not answered for" in meanwhile[-1]
        read_to(driver, lambda line: line.startswith("[1"))  # ten points
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 130
        assert driver.stdout is not None
        told = driver.stdout.read()
        assert "records not in the database: " in told
        assert f"store them with: nsa import {path}" in told
    kept = list(journal.read(path))
    assert isinstance(kept[-1], RunEndRecord)
    importer.import_file(store, path)
    points = queries.points(store, run_id)
    assert list(points["state"]) == [str(r.state) for r in kept if isinstance(r, OutcomeRecord)]
    assert set(points["state"]) == {"ok", "cancelled"}
