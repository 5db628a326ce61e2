"""A home, a spec, a fast probe and a frozen database for runs of the driver on this machine."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest
from quick_driver import COMMAND, MACHINE
from sqlalchemy import text

from orchestrator.execute.local import LocalExecutor
from orchestrator.store import Store

ROOT = Path(__file__).resolve().parents[3]
_SPEC = """
kind: snippet
name: test
codes: {codes}
retries: 0
resources: {{workers: {workers}}}
isolation: {isolation}
deadlines: {{startup_s: 60, heartbeat_s: 60, point_s: 600}}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Path]:
    """Writes a spec whose points run `codes`, with the lines `more` at its end."""

    def write(*codes: str, workers: int = 1, isolation: str = "process", more: str = "") -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(_SPEC.format(codes=json.dumps(codes), workers=workers, isolation=isolation) + more)
        return path

    return write


@pytest.fixture
def quick_probe(snippet_kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the probe, which imports torch in a child for two seconds."""
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: {None: MACHINE})


@pytest.fixture
def start(home: Path, kinds_path: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m jobs --local` with the settings of this process and the quick probe; ends what is left."""
    with ExitStack() as stack:

        def begin(*args: str | Path, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*command, "--local", *map(str, args)],
                cwd=ROOT,
                env={**os.environ, **kinds_path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP's default, which processes started here inherit; tests that run under nohup lack it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
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
