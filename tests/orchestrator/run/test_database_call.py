"""Calls of the database before and after measuring: a stop waits for none, and one without an answer is told."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event

from orchestrator import pending_queries
from orchestrator.database_url import StoreUnavailable
from orchestrator.execute.local import LocalExecutor
from orchestrator.report import summary
from orchestrator.run import announcement, database_call, driver
from orchestrator.run.database_call import call_database
from orchestrator.store import Store, claim, importer, journal, queries

on_postgres = pytest.mark.parametrize("new_database", ["postgres"], indirect=True)


class Stop:
    """Freezes the database before a call, and sends this process SIGTERM while it is made."""

    def __init__(self, freeze: Callable[[], object]) -> None:
        self._freeze = freeze
        self._sent_at = 0.0

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            self.now()
            return call(*args, **options)

        return made

    def now(self) -> None:
        self._freeze()
        threading.Timer(0.2, self._send).start()

    def ended_in_time(self) -> bool:
        """Whether the signal was sent, two seconds ago at most."""
        return time.monotonic() - self._sent_at < 2  # Ray kills a stopped job after three seconds

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def freeze(frozen, home: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, quick_probe) -> Iterator[Callable]:
    """Function that freezes the database of this test's runs until its end."""
    monkeypatch.setenv("NSA_DATABASE_URL", database_url)
    with ExitStack() as stack:
        yield lambda: stack.enter_context(frozen())


@pytest.fixture
def stop(freeze: Callable[[], object]) -> Stop:
    return Stop(freeze)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_1"}}')


def run(*args: str | Path) -> int:
    return driver.main(["--local", *map(str, args)])


# A stop


def test_a_run_that_opens_its_database_can_be_stopped(home, spec, tmp_path, monkeypatch, capsys, quick_probe) -> None:
    """A file that is not in WAL mode yet keeps its readers out."""
    path = tmp_path / "fresh.db"
    monkeypatch.setenv("NSA_DATABASE_URL", f"sqlite:///{path}")
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        stop = Stop(partial(other.execute, "BEGIN EXCLUSIVE"))
        monkeypatch.setattr(Store, "open", stop.before(Store.open))
        assert run(spec("pass")) == driver.CANCELLED
        assert stop.ended_in_time()
    assert capsys.readouterr().err == ""


@pytest.mark.postgres
@on_postgres
def test_a_run_that_is_being_claimed_can_be_stopped(stop: Stop, spec, monkeypatch, capsys) -> None:
    """Also by a connection that the server has accepted."""

    def connecting(*args: Any, **options: Any) -> Engine:
        engine = create_engine(*args, **options)
        event.listen(engine, "engine_connect", lambda connection: stop.now())
        return engine

    monkeypatch.setattr(claim, "create_engine", connecting)
    assert run(spec("pass")) == driver.CANCELLED
    assert stop.ended_in_time()
    assert capsys.readouterr().err == ""


def test_a_resume_that_stores_its_journal_can_be_stopped(stop: Stop, spec, home, monkeypatch, capsys) -> None:
    assert run(spec("raise ValueError")) == driver.FAILURE
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    before = path.read_bytes()
    monkeypatch.setattr(importer, "store_journal", stop.before(importer.store_journal))
    assert run("--resume", path.parent.name, "--retry-failed") == driver.CANCELLED
    assert stop.ended_in_time()
    assert capsys.readouterr().err == ""
    assert path.read_bytes() == before


def test_a_pending_run_can_be_stopped(stop: Stop, spec, submitted, monkeypatch, capsys) -> None:
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: (stop.now(), time.sleep(60)))
    assert run(spec("pass")) == driver.CANCELLED
    assert stop.ended_in_time()
    [line] = capsys.readouterr().err.splitlines()
    assert "has not answered for " in line
    assert "; if the run stays pending there: nsa cancel " in line


def test_a_run_that_is_being_judged_can_be_stopped(stop: Stop, spec, monkeypatch, capsys) -> None:
    monkeypatch.setattr(summary, "print_evaluation", stop.before(summary.print_evaluation))
    assert run(spec("pass")) == driver.OK
    assert stop.ended_in_time()
    told, errors = capsys.readouterr()
    *_, skipped, last = told.splitlines()
    assert skipped.startswith("no verdict now: ")
    assert "is not waited for after SIGTERM; judge later: nsa gate " in skipped
    assert last.endswith(": done")
    assert errors == ""


# A timeout


def test_a_run_whose_database_does_not_answer_does_not_begin(freeze, spec, home, monkeypatch, capsys) -> None:
    assert run(spec("raise ValueError")) == driver.FAILURE
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    before = path.read_bytes()
    for module in ("driver", "resume"):
        monkeypatch.setattr(f"orchestrator.run.{module}.call_database", partial(call_database, timeout_s=0.5))
    freeze()
    capsys.readouterr()
    assert run("--resume", path.parent.name, "--retry-failed") == driver.BAD_INPUT
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: NSA_DATABASE_URL: ")
    assert line.endswith(" s; end what locks or stops it")
    assert path.read_bytes() == before


def test_an_order_is_refused_without_the_database(freeze, spec, submitted, monkeypatch, capsys) -> None:
    monkeypatch.setattr("orchestrator.run.refusal.call_database", partial(call_database, timeout_s=0.5))
    freeze()
    asked = time.monotonic()
    assert run(spec("pass", more="lenghts: [1]\n")) == driver.BAD_INPUT
    assert time.monotonic() - asked < 20  # kinds of jobs are imported; the database is waited for 30 s or without end
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: lenghts: ")


@pytest.mark.postgres
@on_postgres
def test_a_run_is_not_looked_for_without_end(freeze, monkeypatch, capsys) -> None:
    monkeypatch.setattr("orchestrator.run.resume.call_database", partial(call_database, timeout_s=0.5))
    freeze()
    assert run("--resume", "20261120-120000-demo-abcd") == driver.BAD_INPUT
    [line] = capsys.readouterr().err.splitlines()
    assert "and the database cannot be asked: NSA_DATABASE_URL: " in line
    assert " has not answered for " in line


def test_a_run_goes_on_while_the_database_does_not_take_that_it_is_pending(
    freeze, spec, submitted, monkeypatch, capsys, store: Store
) -> None:
    """The record that comes too late undoes no later one."""
    monkeypatch.setattr(announcement, "SLOW_S", 0.3)
    apply = Store.apply

    def late(*args: Any) -> None:
        pending_queries.sent()
        time.sleep(1.0)
        apply(*args)

    monkeypatch.setattr(Store, "apply", late)
    assert run(spec("import time; time.sleep(1)")) == driver.OK
    assert "; meanwhile the run goes on without being shown there" in capsys.readouterr().err
    assert list(queries.runs(store)["state"]) == ["done"]


def test_a_call_without_an_answer_is_told_and_then_left(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(database_call, "SLOW_S", 0.1)
    thaw, made = threading.Event(), []

    def call() -> None:
        pending_queries.sent()
        thaw.wait(60)
        made.append("first")

    with pytest.raises(StoreUnavailable, match=r"^NSA_DATABASE_URL: 'db': has not answered for 0\.[4-9] s; "):
        call_database("db", call, timeout_s=0.4)
    line = "warning: NSA_DATABASE_URL: 'db': has not answered for 0.1 s; it is waited for, 0.4 s at most\n"
    assert capsys.readouterr().err in (line, line.replace("0.1", "0.2"))
    with pytest.raises(StoreUnavailable):
        call_database("db", partial(made.append, "second"), timeout_s=0.2)
    thaw.set()
    call_database("db", partial(made.append, "third"))
    assert made == ["first", "second", "third"]


def test_a_long_call_that_is_answered_again_and_again_is_not_left(sqlite_store: Store, capsys) -> None:
    """As where a large journal is stored, or curves are fitted between two queries."""

    def call() -> int:
        with sqlite_store.session() as session:
            connection = session.connection().connection.driver_connection
            assert connection is not None
            connection.create_function("wait", 0, lambda: time.sleep(0.2))
            for _ in range(3):
                session.connection().exec_driver_sql("SELECT wait()")
            time.sleep(0.6)
        time.sleep(0.6)
        return 1

    assert call_database("db", call, timeout_s=0.5) == 1
    assert capsys.readouterr().err == ""
