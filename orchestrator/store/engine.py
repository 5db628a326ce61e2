"""Database connections, optionally read-only: SQLite set up for one writer and many readers, or Postgres."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, exc, make_url
from sqlalchemy.pool import NullPool

from jobs.schema.plain_text import in_a_line
from orchestrator.database_url import (
    SETTING,
    BrokenStoreError,
    StoreError,
    StoreUnavailable,
    check_url,
    hide_password,
    sqlite_path,
)

TIMEOUT_S = 10
"""Seconds that a statement waits for another process's lock."""
# Seconds, and milliseconds: a server whose host is gone is noticed within half a minute. A role, a database or the URL
# may have set another encoding, in which the driver reads texts as bytes.
_POSTGRES = {
    "client_encoding": "UTF8",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
_AWAY = (exc.OperationalError, exc.InterfaceError, exc.InternalError)
_NO_RIGHT = "42501"  # Postgres: insufficient_privilege
_NO_TABLE = ("42P01", "42703", "3F000")  # Postgres: undefined_table, undefined_column, invalid_schema_name


def parse(url: str) -> URL:
    """The URL, validated. Raises StoreError."""
    try:
        checked = check_url(url)
        path = sqlite_path(checked)  # SQLAlchemy decodes %3F in it since 2.1 only
        return make_url(checked) if path is None else URL.create("sqlite", database=str(path))
    except exc.ArgumentError:
        raise StoreError(f"{SETTING}: {hide_password(url)!r}: is no URL; use sqlite:///PATH") from None


def shown(url: URL) -> str:
    """The URL without its password, for messages."""
    return hide_password(url.render_as_string(hide_password=True))


def make_engine(url: URL, *, readonly: bool = False, create: bool = False) -> Engine:
    """An engine for `url`, not connected yet; `create`: it makes a SQLite file that is not there."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, readonly, create)
    options = {"postgresql_readonly": True} if readonly else {}
    try:
        return create_engine(url, pool_pre_ping=True, execution_options=options, connect_args=_POSTGRES, pool_size=5)
    except exc.ArgumentError as err:  # of options that do not fit together
        raise StoreError(f"{SETTING}: {shown(url)!r}: {hide_password(in_a_line(err))}; correct the URL") from None


def _sqlite(url: URL, readonly: bool, create: bool) -> Engine:
    path = Path(url.database or "").absolute()

    def connect() -> sqlite3.Connection:
        mode = "ro" if readonly else "rwc" if create else "rw"
        if readonly and not (os.access(path.parent, os.W_OK) or os.path.exists(f"{path}-wal")):
            mode = "ro&immutable=1"  # as it stands: no log is beside it and none can be made
        # isolation_level None: this module begins transactions itself, so that schema changes are atomic, too.
        connection = sqlite3.connect(
            f"file:{quote(str(path))}?mode={mode}",
            uri=True,
            timeout=TIMEOUT_S,
            check_same_thread=False,
            isolation_level=None,
        )
        connection.execute("PRAGMA foreign_keys = ON")
        if not readonly:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose commits; the journal keeps them
        return connection

    # No pool: a connection that is kept goes on with a file that was moved away or replaced.
    engine = create_engine(url, creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes its lock at once: upgrading a read lock later fails without waiting for the other writer.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


@contextmanager
def errors(url: URL) -> Iterator[None]:
    """Raise database errors as one-line StoreErrors without passwords; transient ones as StoreUnavailable."""
    name = f"{SETTING}: {shown(url)!r}"
    try:
        yield
    except exc.DBAPIError as err:
        text = hide_password(in_a_line(err.orig))
        code = getattr(err.orig, "sqlite_errorcode", None) or getattr(err.orig, "sqlstate", None)
        kind, problem = StoreError, f"refused the data ({text}); report this as a bug"
        if isinstance(err, exc.IntegrityError):
            fix = "a record contradicts one that is stored, or is there twice; give the journal as the run wrote it"
            problem = f"refused the data ({text}): {fix}"
        elif isinstance(err, _AWAY) or err.connection_invalidated:
            fix = "start the database or correct the URL"
            kind, problem = StoreUnavailable, f"cannot be reached or used ({text}); {fix}"
        elif code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            kind, problem = BrokenStoreError, f"{text}; name another file"
        elif isinstance(err, exc.ProgrammingError) and err.statement is None:  # in connecting
            problem = f"cannot be used ({text}); correct the URL"
        elif code == _NO_RIGHT:
            kind, problem = BrokenStoreError, f"refused ({text}); name a role in the URL that has this right"
        elif code in _NO_TABLE:
            kind, problem = BrokenStoreError, f"{text}; run `nsa db upgrade`"
        raise kind(f"{name}: {problem}") from None
    except (exc.StatementError, UnicodeError, OverflowError) as err:  # of a value that the driver cannot pass on
        text = in_a_line(err.orig if isinstance(err, exc.StatementError) else err)
        raise StoreError(f"{name}: cannot hold a value ({text}); correct it") from None
