"""The schema's revision is told as Alembic tells it, but without Alembic, which takes long to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import text

from orchestrator.store import Store, StoreError, upgrade
from orchestrator.store.schema import MIGRATIONS, revisions

OPEN = "import sys; from orchestrator.store import Store; Store.open(sys.argv[1]).close(); print(*sys.modules)"


def test_revisions_are_those_of_alembic():
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    assert revisions() == [script.revision for script in scripts.walk_revisions()][::-1]
    assert revisions()[-1] == scripts.get_current_head()


def test_opening_a_current_database_does_not_import_alembic(database_url: str):
    done = subprocess.run([sys.executable, "-c", OPEN, database_url], capture_output=True, text=True, check=True)
    assert "sqlalchemy" in done.stdout.split()
    assert "alembic" not in done.stdout.split()


@pytest.mark.postgres
def test_several_revisions_in_a_servers_database_are_refused(postgres_url: str):
    upgrade(postgres_url)
    with Store.open(postgres_url) as store, store.session(writes=True) as session:
        session.execute(text("INSERT INTO alembic_version VALUES ('1a2b')"))
    for attempt in (upgrade, Store.open):
        with pytest.raises(StoreError, match=r"alembic_version has several revisions, \w+, 1a2b; delete the rows"):
            attempt(postgres_url)
