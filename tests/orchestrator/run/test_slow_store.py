"""A database that is locked or frozen: points are measured as before, and the driver can be ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from quick_driver import COMMAND

from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import OutcomeRecord, RunEndRecord

ROOT = Path(__file__).resolve().parents[3]
POINTS = 60


@pytest.fixture
def start(
    spec, home: Path, kinds_path: dict[str, str], database_url: str
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Function that starts a driver in its own process, which measures many short points."""
    with ExitStack() as stack:

        def start() -> subprocess.Popen[str]:
            path = spec(*["value = 1.0"] * POINTS)
            env = {**os.environ, **kinds_path, "NSA_HOME": str(home), "NSA_DATABASE_URL": database_url}
            command = [*COMMAND, str(path), "--local"]
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def read_to(process: subprocess.Popen[str], found: Callable[[str], bool]) -> list[str]:
    """The lines of a process up to the one that is looked for."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if found(line):
            return lines
    raise AssertionError("\n".join(lines))


def test_a_database_that_does_not_answer_stalls_no_point_and_no_end(start, frozen, store: Store, home: Path) -> None:
    driver = start()
    begun = read_to(driver, lambda line: line.startswith("[2/"))
    run_id = begun[0].removeprefix("run ").split(":")[0]
    path = home / "artifacts" / run_id / journal.NAME
    with frozen():
        meanwhile = read_to(driver, lambda line: "results go to the journal" in line)
        assert "has not answered for" in meanwhile[-1]
        read_to(driver, lambda line: line.startswith("[1"))  # ten points
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(20) == 130  # 1.5 s on an idle machine; a wait for the database is 30 s or without end
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


@pytest.mark.postgres
@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)
def test_a_run_whose_server_does_not_answer_does_not_begin(start, frozen, home: Path) -> None:
    with frozen():
        driver = start()
        told, _ = driver.communicate(timeout=60)
    assert driver.returncode == 2
    assert told.startswith("error: NSA_DATABASE_URL: ")
    assert told.count("\n") == 1
    assert not (home / "artifacts").exists()
