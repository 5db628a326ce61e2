"""Database connections, optionally read-only: SQLite set up for one writer and many readers, or Postgres; and the
schema's version there. Migrations run from code, never by hand."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from jobs.schema.plain_text import in_a_line
from orchestrator.database_url import SETTING, StoreError, StoreUnavailable, hide_password, sqlite_path
from orchestrator.store import views
from orchestrator.store.models import Base

_FORMS = "sqlite:///PATH or postgresql+psycopg://USER@HOST/NAME"
TIMEOUT_S = 10  # seconds that a statement waits for another process's lock
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
MIGRATIONS = Path(__file__).parent / "migrations"
REVISIONS = sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("*.py"))
"""Revisions of this version, oldest first: the numbers that the migrations' names begin with."""
_VERSION = sa.table("alembic_version", sa.column("version_num", sa.String))
_LOCK = 7_263_001  # arbitrary advisory lock key: serializes migrations of one Postgres database


def parse(url: str) -> sa.URL:
    """The URL, validated, its driver named. Needs no database driver. Raises StoreError."""
    mistake = f"{SETTING}: {hide_password(url)!r}:"
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "sqlite":
        if not rest.startswith("/") or rest == "/" or ":memory:" in rest:
            raise StoreError(f"{mistake} names no file; use sqlite:///PATH (four slashes if absolute)")
        if "?" in rest:
            raise StoreError(f"{mistake} a file takes no options; leave out '?', or write %3F in a path")
        if "\0" in (path := str(sqlite_path(url))):  # SQLAlchemy decodes %3F in it since 2.1 only
            raise StoreError(f"{mistake} holds a NUL character, which no path may; remove it")
        return sa.URL.create("sqlite", database=path)
    if scheme.lower() not in ("postgresql", "postgresql+psycopg"):
        raise StoreError(f"{mistake} unknown kind of database; use {_FORMS}")
    try:
        parsed = sa.make_url(f"postgresql+psycopg://{rest}")
    except (exc.ArgumentError, ValueError):  # its text may hold a part of the password
        raise StoreError(f"{mistake} its host or port cannot be read; use {_FORMS}") from None
    if "@" in (parsed.host or ""):
        raise StoreError(f"{mistake} has an @ in its password; write %40 for it")
    if not parsed.database or not (parsed.host or "host" in parsed.query):
        raise StoreError(f"{mistake} lacks a host or a database name; use {_FORMS}")
    return parsed


def shown(url: sa.URL) -> str:
    """The URL without its password, for messages."""
    return hide_password(url.render_as_string(hide_password=True))


def make_engine(url: sa.URL, *, readonly: bool = False, create: bool = False) -> sa.Engine:
    """An engine for `url`, not connected yet; `create`: it makes a SQLite file that is not there."""
    if url.get_backend_name() == "sqlite":
        return _sqlite(url, readonly, create)
    options = {"postgresql_readonly": True} if readonly else {}
    try:
        engine = sa.create_engine(
            url, pool_pre_ping=True, execution_options=options, connect_args=_POSTGRES, pool_size=5
        )
    except exc.ArgumentError as err:  # of options that do not fit together
        raise StoreError(f"{SETTING}: {shown(url)!r}: {hide_password(in_a_line(err))}; correct the URL") from None

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("SET datestyle TO 'ISO'")  # the driver reads no times of another style
        cursor.execute(f"SET lock_timeout TO '{TIMEOUT_S}s'")
        connection.commit()

    return engine


def _sqlite(url: sa.URL, readonly: bool, create: bool) -> sa.Engine:
    path = Path(url.database or "").absolute()
    mode = "ro" if readonly else "rwc" if create else "rw"
    if readonly and not (os.access(path.parent, os.W_OK) or os.path.exists(f"{path}-wal")):
        mode = "ro&immutable=1"  # as it stands: no log is beside it and none can be made
    address = f"file:{quote(str(path))}?mode={mode}"

    def connect() -> sqlite3.Connection:
        # isolation_level None: this module begins transactions itself, so that schema changes are atomic, too.
        connection = sqlite3.connect(
            address, uri=True, timeout=TIMEOUT_S, check_same_thread=False, isolation_level=None
        )
        connection.execute("PRAGMA foreign_keys = ON")
        # SQLite's own knows ASCII alone: a search would find other rows than Postgres does.
        connection.create_function("lower", 1, lambda x: x.lower() if isinstance(x, str) else x, deterministic=True)
        if not readonly:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose commits; the journal keeps them
        return connection

    engine = sa.create_engine(url, creator=connect)

    @event.listens_for(engine, "connect")
    def note(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        record.info["file"] = _identity(path)

    @event.listens_for(engine, "checkout")
    def look(connection: DBAPIConnection, record: ConnectionPoolEntry, proxy: object) -> None:
        if record.info.get("file") != _identity(path):  # SQLite would go on with the one that was moved away or removed
            raise exc.DisconnectionError

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # A writer takes its lock at once: upgrading a read lock later fails without waiting for the other writer.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at a path; None if there is none."""
    try:
        there = path.stat()
    except OSError:
        return None
    return there.st_dev, there.st_ino


@contextmanager
def errors(url: sa.URL) -> Iterator[None]:
    """Raise database errors as one-line StoreErrors without passwords; transient ones as StoreUnavailable."""
    name = f"{SETTING}: {shown(url)!r}"
    try:
        yield
    except exc.DBAPIError as err:
        text = hide_password(in_a_line(err.orig))
        code = getattr(err.orig, "sqlite_errorcode", None) or getattr(err.orig, "sqlstate", None)
        if isinstance(err, exc.IntegrityError):
            fix = "a record contradicts one that is stored, or is there twice; give the journal as the run wrote it"
            error = StoreError(f"{name}: refused the data ({text}): {fix}")
        elif isinstance(err, _AWAY) or err.connection_invalidated:
            fix = "start the database or correct the URL"
            error = StoreUnavailable(f"{name}: cannot be reached or used ({text}); {fix}")
        elif code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            error = StoreError(f"{name}: {text}; name another file")
        elif isinstance(err, exc.ProgrammingError) and err.statement is None:  # in connecting
            error = StoreError(f"{name}: cannot be used ({text}); correct the URL")
        elif code == _NO_RIGHT:
            error = StoreError(f"{name}: refused ({text}); name a role in the URL that has this right")
        elif code in _NO_TABLE:
            error = StoreError(f"{name}: {text}; run `nsa db upgrade`")
        else:
            error = StoreError(f"{name}: refused the data ({text}); report this as a bug")
        raise error from None
    except (exc.StatementError, UnicodeError, OverflowError) as err:  # of a value that the driver cannot pass on
        text = in_a_line(err.orig if isinstance(err, exc.StatementError) else err)
        raise StoreError(f"{name}: cannot hold a value ({text}); correct it") from None


def upgrade(url: str) -> tuple[str | None, str]:
    """Create or migrate the database at `url`, in one transaction. Returns (revision before, revision after).

    Raises StoreError if the URL is wrong or the database cannot be migrated, StoreUnavailable if it cannot be reached.
    """
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        folder = Path(parsed.database or "").absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            problem = f"no folder {str(folder)!r} ({err.strerror}); name another"
            raise StoreError(f"{SETTING}: {shown(parsed)!r}: {problem}") from None
    engine = make_engine(parsed, create=True)
    head = REVISIONS[-1]
    try:
        with errors(parsed):
            with engine.connect() as connection:
                if _revision(connection) == head:
                    return head, head  # without waiting for a current writer's lock
            with engine.connect().execution_options(writes=True) as connection, connection.begin():
                if connection.dialect.name == "postgresql":
                    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
                before = _revision(connection)
                if before != head:
                    from alembic import command  # takes long to import, and most databases are current
                    from alembic.config import Config

                    config = Config()
                    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
                    config.attributes["connection"] = connection
                    # A migration may change any table: the views are made again after it.
                    for name in reversed(views.QUERIES):
                        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
                    if before is None:
                        Base.metadata.create_all(connection)
                    (command.stamp if before is None else command.upgrade)(config, "head")
                    for name, query in views.QUERIES.items():
                        view = query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
                        connection.exec_driver_sql(f"CREATE VIEW {name} AS {view}")
                return before, head
    finally:
        engine.dispose()


def check_schema(connection: sa.Connection) -> None:
    """Raise StoreError unless the schema has the newest revision."""
    revision = _revision(connection)
    if revision != REVISIONS[-1]:
        problem = "holds no tables yet" if revision is None else f"has the older schema {revision}"
        raise StoreError(f"{SETTING}: {shown(connection.engine.url)!r}: {problem}; run `nsa db upgrade`")


def _revision(connection: sa.Connection) -> str | None:
    """The database's revision; None without any. Raises StoreError if it is another application's, or this version
    does not know it. Read without Alembic, whose import takes long."""
    name, found = shown(connection.engine.url), sa.inspect(connection)
    tables = sorted({*found.get_table_names()} - {_VERSION.name})
    stored = sa.select(_VERSION.c.version_num)
    heads = list(connection.scalars(stored)) if found.has_table(_VERSION.name) else []
    alone = connection.dialect.name == "sqlite"  # a server's database may well be shared
    if alone and (len(heads) > 1 or (tables and not heads)):
        theirs = in_a_line(", ".join(tables), 100)
        raise StoreError(f"{SETTING}: {name!r}: is another application's, with the tables {theirs}; name another file")
    if not heads:
        return None
    if "point" in tables and "attempt" not in tables:
        raise StoreError(
            f"{SETTING}: {name!r}: has the schema {heads[0]} of a version before 0.2.0, which cannot be read; name a "
            "new database and bring the journals into it: nsa import JOURNAL..."
        )
    if heads[0] not in REVISIONS:
        raise StoreError(f"{SETTING}: {name!r}: has the schema {heads[0]} of a newer version; update nsa-bench here")
    return heads[0]
