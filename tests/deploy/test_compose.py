"""docker-compose.yml, without a Docker daemon: its schema, its promises in docs/deployment.md, and its Postgres."""

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
import yaml
from dashboard_pages import show, text
from made_up_runs import make_sweep
from postgres_process import BINARIES, identity
from processes import free_ports, wait_for
from ray_clusters import stop_node
from sqlalchemy import text as sql

from orchestrator.store import Store, StoreError, upgrade

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
SECRETS = re.findall(r"^(\w+)=$", (ROOT / ".env.example").read_text(), re.MULTILINE)
INIT = "/docker-entrypoint-initdb.d/"


@pytest.mark.parametrize(
    ("file", "schema"), [(FILE, "compose-spec"), (ROOT / ".github/workflows/ci.yml", "github-workflows")]
)
def test_a_file_of_others_format_matches_its_schema(file: Path, schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(file)]
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
    assert sorted(SECRETS) == ["NSA_DASHBOARD_PASSWORD", "POSTGRES_PASSWORD", "RAY_AUTH_TOKEN"]
    assert all(f"${{{secret}:?" in text for secret in SECRETS)


def test_ray_requires_its_token_and_postgres_is_asked_over_tcp() -> None:
    assert all(SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token" for name in ("ray-head", "gpu-worker"))
    # The image's temporary server, which creates the data folder, answers on the socket alone.
    assert "--host=127.0.0.1" in SERVICES["postgres"]["healthcheck"]["test"]


def test_nobody_takes_a_job_or_shows_a_page_before_the_tables_are_there() -> None:
    after = {name: service.get("depends_on", {}) for name, service in SERVICES.items()}
    assert after["migrate"] == {"postgres": {"condition": "service_healthy"}}
    for name in ("ray-head", "dashboard"):
        assert after[name] == {"migrate": {"condition": "service_completed_successfully"}}
    assert after["gpu-worker"] == {"ray-head": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", ["ray-head", "gpu-worker", "dashboard"])
def test_ray_and_streamlit_take_the_options_of_commands_and_health_checks(name: str) -> None:
    from ray.scripts.scripts import cli as ray
    from streamlit.web.cli import main as streamlit

    commands = [shlex.split(SERVICES[name]["command"]), SERVICES[name]["healthcheck"]["test"][1:]]
    for program, command, *options in commands[: 1 if name == "dashboard" else 2]:
        found = (ray if program == "ray" else streamlit).commands[command]
        found.make_context(command, options)


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The file's Postgres as its image begins it, on loopback; the address of its database in each service."""
    folder = Path(tempfile.mkdtemp(prefix="nsa-postgres-"))
    folder.chmod(0o755)  # it may run as another user
    (init := folder / "init").mkdir()
    for source, target in (volume.split(":")[:2] for volume in SERVICES["postgres"]["volumes"]):
        if target.startswith(INIT):
            shutil.copy(ROOT / source, init / target.removeprefix(INIT))
    shutil.copy(ROOT / "tests" / "deploy" / "postgres_entrypoint.sh", folder)
    [port], values = free_ports(1), {name: secrets.token_hex(32) for name in SECRETS}

    def environment(name: str) -> dict[str, str]:
        given = {key: str(value).replace("@postgres:5432", f"@127.0.0.1:{port}") for key, value in
                 SERVICES[name]["environment"].items()}  # fmt: skip
        return {key: re.sub(r"\$\{(\w+)[^}]*\}", lambda m: values.get(m[1], ""), value) for key, value in given.items()}

    env = environment("postgres") | {"PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "PGHOST": str(folder)}
    env |= {"PGPORT": str(port), "PGDATA": str(folder / "data"), "INIT_FOLDER": str(init)}
    env["ROLES_SQL"] = str(init / "roles.psql")
    with (folder / "log").open("w") as log:
        begin = ["bash", str(folder / "postgres_entrypoint.sh")]
        server = subprocess.Popen(begin, env=env, stdout=log, stderr=log, start_new_session=True, **identity(folder))
    healthy = SERVICES["postgres"]["healthcheck"]["test"][1:]
    try:
        wait_for(lambda: subprocess.run(healthy, env=env).returncode == 0, 60, (folder / "log").read_text, pause=0.2)
        yield {name: environment(name).get("NSA_DATABASE_URL", "") for name in SERVICES}
    finally:
        stop_node(server)
        shutil.rmtree(folder, ignore_errors=True)


def delete_runs(store: Store) -> None:
    with store.session(writes=True) as session:
        session.execute(sql("SET TRANSACTION READ WRITE"))  # the role's default is only a default
        session.execute(sql("DELETE FROM run"))


@pytest.mark.postgres
def test_jobs_own_the_database_and_the_dashboard_reads_it_alone(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade(urls["migrate"])
    assert urls["ray-head"] == urls["gpu-worker"] == urls["migrate"]
    with Store.open(urls["ray-head"]) as store, store.session() as session:
        store.apply_many(make_sweep("r1"))
        assert session.scalar(sql("SELECT usesuper FROM pg_user WHERE usename = current_user")) is False
    for cached in (st.cache_data, st.cache_resource):
        cached.clear()
    monkeypatch.setenv("NSA_DATABASE_URL", urls["dashboard"])
    assert "r1" in text(show("runs"))
    st.cache_resource.clear()
    with Store.open(urls["dashboard"]) as store, pytest.raises(StoreError, match="permission denied"):
        delete_runs(store)


@pytest.mark.postgres
def test_nobody_comes_over_the_network_as_the_superuser_or_without_a_password(urls: dict[str, str]) -> None:
    owner = urls["ray-head"]
    with pytest.raises(StoreError, match="password authentication failed"):
        Store.open(owner.replace("://nsa:", "://postgres:"))
    with pytest.raises(StoreError, match="no password supplied"):
        Store.open(re.sub("://nsa:[^@]*@", "://nsa@", owner))
