"""A database that is locked or frozen in mid run: points are measured as before, and the driver can be ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import text

from orchestrator import journal
from orchestrator.records import OutcomeRecord, RunEndRecord
from orchestrator.store import Store, importer, queries

ROOT = Path(__file__).resolve().parents[3]
POINTS = 60


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield


@contextmanager
def _stopped(server: list[psutil.Process]) -> Iterator[None]:
    for process in server:
        process.suspend()
    try:
        yield
    finally:
        for process in server:
            process.resume()


@pytest.fixture
def frozen(store: Store) -> Callable[[], AbstractContextManager[None]]:
    """Function to a context in which the database answers nobody: a locked file, stopped processes of Postgres."""

    def freeze() -> AbstractContextManager[None]:
        if store.engine.dialect.name == "sqlite":
            return _locked(str(store.engine.url.database))
        with store.session() as session:
            backend = psutil.Process(session.scalars(text("SELECT pg_backend_pid()")).one())
        server = backend.parent()
        assert server is not None
        return _stopped([server, *server.children()])

    return freeze


@pytest.fixture
def driver(spec, home: Path, kinds_path: dict[str, str], database_url: str) -> Iterator[subprocess.Popen[str]]:
    """A driver in its own process that measures many short points."""
    path = spec(*["value = 1.0"] * POINTS)
    env = {**os.environ, **kinds_path, "NSA_HOME": str(home), "NSA_DATABASE_URL": database_url}
    command = [sys.executable, "-m", "jobs", str(path), "--local"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield process
    process.kill()
    process.wait()


def read_to(process: subprocess.Popen[str], found: Callable[[str], bool]) -> list[str]:
    """The lines of a process up to the one that is looked for."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if found(line):
            return lines
    raise AssertionError("\n".join(lines))


def test_a_database_that_does_not_answer_stalls_no_point_and_no_end(driver, frozen, store: Store, home: Path) -> None:
    begun = read_to(driver, lambda line: line.startswith("[2/"))
    run_id = begun[0].removeprefix("run ").split(":")[0]
    path = home / "artifacts" / run_id / journal.NAME
    with frozen():
        at = time.monotonic()
        meanwhile = read_to(driver, lambda line: "results go to the journal" in line)
        assert time.monotonic() - at < 6  # two seconds on an idle machine
        assert "has not answered for" in meanwhile[-1]
        read_to(driver, lambda line: line.startswith("[1"))  # ten points
        at = time.monotonic()
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(20) == 130
        assert time.monotonic() - at < 5  # 1.5 s on an idle machine; a wait for the database is 30 s or without end
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
