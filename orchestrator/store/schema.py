"""The schema's version; migrations run from code, never by hand."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, String, column, inspect, select, table, text

from jobs.schema.plain_text import in_a_line
from orchestrator.database_url import SETTING, StoreError
from orchestrator.store import views
from orchestrator.store.engine import errors, make_engine, parse, shown
from orchestrator.store.models import Base

MIGRATIONS = Path(__file__).parent / "migrations"
REVISIONS = sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("*.py"))
"""Revisions of this version, oldest first: the numbers that the migrations' names begin with."""
_VERSION = table("alembic_version", column("version_num", String))
_LOCK = 7_263_001  # arbitrary advisory lock key: serializes migrations of one Postgres database


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
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
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


def check(connection: Connection) -> None:
    """Raise StoreError unless the schema has the newest revision."""
    revision = _revision(connection)
    if revision != REVISIONS[-1]:
        problem = "holds no tables yet" if revision is None else f"has the older schema {revision}"
        raise StoreError(f"{SETTING}: {shown(connection.engine.url)!r}: {problem}; run `nsa db upgrade`")


def _revision(connection: Connection) -> str | None:
    """The database's revision; None without any. Raises StoreError if it is another application's, or this version
    does not know it. Read without Alembic, whose import takes long."""
    name, found = shown(connection.engine.url), inspect(connection)
    tables = sorted({*found.get_table_names()} - {_VERSION.name})
    stored = select(_VERSION.c.version_num)
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
