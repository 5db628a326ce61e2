"""The schema's version; migrations run from code, never by hand."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, String, column, inspect, select, table, text

from jobs.schema.plain_text import in_a_line
from orchestrator.database_url import SETTING, StoreError
from orchestrator.store import views
from orchestrator.store.engine import errors, make_engine, parse, shown

MIGRATIONS = Path(__file__).parent / "migrations"
_VERSION = table("alembic_version", column("version_num", String))
_EARLIER = [f"{number:04}" for number in range(2, 11)]
_LOCK = 7_263_001  # arbitrary advisory lock key: serializes migrations of one Postgres database


def upgrade(url: str) -> tuple[str | None, str]:
    """Create or migrate the database at `url`. Returns (revision before, revision after).

    Raises:
        StoreError: the URL is wrong, the schema is newer than this code, or a SQLite file is another application's.
        StoreUnavailable: the database cannot be reached.
    """
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        folder = Path(parsed.database or "").absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise StoreError(
                f"{SETTING}: {shown(parsed)!r}: no folder {str(folder)!r} ({err.strerror}); name another"
            ) from None
        refuse_another(parsed)
    engine = make_engine(parsed, create=True)
    try:
        with errors(parsed):
            return migrate(engine)
    finally:
        engine.dispose()


def migrate(engine: Engine) -> tuple[str | None, str]:
    """Migrate the schema to the newest revision in one transaction. Returns (revision before, revision after)."""
    head = revisions()[-1]
    with engine.connect() as connection:
        if _revision(connection) == head:
            return head, head  # without waiting for a current writer's lock
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        before = _revision(connection)
        if before != head:
            _known(before, engine)
            views.drop(connection)
            _upgrade(connection)
            views.create(connection)
        return before, head


def check(engine: Engine) -> None:
    """Raise StoreError unless the schema has the newest revision."""
    with engine.connect() as connection:
        _check_owner(connection)
        revision = _revision(connection)
    if revision == revisions()[-1]:
        return
    _known(revision, engine)
    problem = "holds no tables yet" if revision is None else f"has the older schema {revision}"
    raise StoreError(f"{SETTING}: {shown(engine.url)!r}: {problem}; run `nsa db upgrade`")


def revisions() -> list[str]:
    """The revisions of this version, oldest first: the numbers that the migrations' names begin with."""
    found = sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("*.py"))
    assert found, "the package holds no migrations"
    return found


def refuse_another(url: URL) -> None:
    """Raise StoreError for another application's file. It is opened for reading, as writing would change its mode."""
    if os.path.isfile(url.database or ""):
        engine = make_engine(url, readonly=True)
        try:
            with errors(url), engine.connect() as connection:
                _check_owner(connection)
        finally:
            engine.dispose()


def _check_owner(connection: Connection) -> None:
    if connection.dialect.name != "sqlite":  # a server's database may well be shared
        return
    heads = _heads(connection)
    tables = sorted({*inspect(connection).get_table_names()} - {"alembic_version"})
    if len(heads) > 1 or (tables and not heads):
        raise StoreError(
            f"{SETTING}: {shown(connection.engine.url)!r}: is another application's, with the tables "
            f"{in_a_line(', '.join(tables), 100)}; name another file"
        )


def _known(revision: str | None, engine: Engine) -> None:
    if revision in _EARLIER:
        raise StoreError(
            f"{SETTING}: {shown(engine.url)!r}: has the schema {revision} of a version before 0.2.0, which cannot be "
            "read; name a new database and bring the journals into it: nsa import JOURNAL..."
        )
    if revision is not None and revision not in revisions():
        raise StoreError(
            f"{SETTING}: {shown(engine.url)!r}: has the schema {revision} of a newer version; update nsa-bench here"
        )


def _upgrade(connection: Connection) -> None:
    from alembic import command  # takes long to import, and most databases are current
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: Connection) -> str | None:
    heads = _heads(connection)
    if len(heads) > 1:  # of a server's database
        raise StoreError(
            f"{SETTING}: {shown(connection.engine.url)!r}: alembic_version has several revisions, "
            f"{in_a_line(', '.join(sorted(heads)), 100)}; delete the rows that are not of nsa-bench, or name another "
            "database"
        )
    return heads[0] if heads else None


def _heads(connection: Connection) -> list[str]:
    """The revisions in Alembic's table; none without it. Asked for without Alembic, as each process asks."""
    if not inspect(connection).has_table(_VERSION.name):
        return []
    return list(connection.scalars(select(_VERSION.c.version_num)))
