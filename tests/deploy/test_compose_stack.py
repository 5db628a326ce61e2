"""The stack of docker-compose.yml, run as processes: migrate, submit, resume, the dashboard's role, the token."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from compose_stack import ROOT, Stack, running_stack
from processes import wait_for
from sqlalchemy import create_engine, text

from orchestrator.store import Store, StoreError, queries

pytestmark = [pytest.mark.ray, pytest.mark.postgres, pytest.mark.timeout(240)]
SECRETS = re.findall(r"^(\w+)=$", (ROOT / ".env.example").read_text(), re.MULTILINE)
DOCUMENTED = re.compile(r"^ray job submit .* -- (?=python -m jobs )", re.MULTILINE)
SHOW = """
from streamlit.testing.v1 import AppTest
app = AppTest.from_file("dashboard/app.py", default_timeout=60)
app.switch_page("runs.py")
app.run()
assert not app.exception, app.exception
print(*(table.value.to_csv() for table in app.dataframe))
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack({name: secrets.token_hex(32) for name in SECRETS}) as found:
        yield found


@pytest.fixture
def as_owner(stack: Stack) -> Iterator[Store]:
    """The database as jobs open it."""
    with Store.open(stack.environment("ray-head")["NSA_DATABASE_URL"], readonly=True) as store:
        yield store


def as_superuser(stack: Stack, statement: str) -> list[tuple[Any, ...]]:
    """The answer of Postgres to its superuser, who is inside its container."""
    inside = stack.environment("postgres")
    url = f"postgresql+psycopg://{inside['POSTGRES_USER']}@/{inside['POSTGRES_DB']}"
    engine = create_engine(f"{url}?host={inside['PGHOST']}&port={inside['PGPORT']}")
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(text(statement))]
    engine.dispose()
    return rows


def submit(stack: Stack, *arguments: str, wait: bool = True) -> str:
    """Run the line of docs/deployment.md that submits a job, with other arguments. Returns what it prints."""
    line = DOCUMENTED.search((ROOT / "docs" / "deployment.md").read_text())
    assert line is not None
    command = [*stack.here(line[0]).split(), "python", "-m", "jobs", *arguments]
    if not wait:
        command.insert(3, "--no-wait")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": stack.secrets["RAY_AUTH_TOKEN"]}
    env = {"PATH": stack.environment("ray-head")["PATH"], "HOME": str(stack.folder), **token}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(stack: Stack, path: str, *, method: str = "GET", token: str | None = None) -> Any:
    """The head's answer to one who has the stack's token, or another, or none ("")."""
    token = stack.secrets["RAY_AUTH_TOKEN"] if token is None else token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(stack.here("http://127.0.0.1:8265") + path, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def runs(store: Store) -> list[str]:
    return list(queries.runs(store)["run_id"])


def states(store: Store, run_id: str) -> list[tuple[str, int]]:
    points = queries.points(store, run_id)
    return list(zip(points["state"], points["attempt"], strict=True))


def delete_runs(store: Store) -> None:
    with store.session(writes=True) as session:
        session.execute(text("SET TRANSACTION READ WRITE"))  # the role's default is only a default
        session.execute(text("DELETE FROM run"))


def test_services_begin_in_the_order_that_their_work_needs(stack: Stack) -> None:
    """Whatever order the file gives: nobody takes a job or shows a page before the schema is there."""
    order = [
        "postgres started",
        "postgres service_healthy",
        "migrate started",
        "migrate service_completed_successfully",
    ]
    place = [stack.events.index(event) for event in (*order, "ray-head started", "ray-head service_healthy")]
    assert place == sorted(place)
    assert stack.events.index("gpu-worker started") > stack.events.index("ray-head service_healthy")
    assert stack.events.index("dashboard started") > stack.events.index("migrate service_completed_successfully")
    assert {name: one.poll() for name, one in stack.processes.items()} == dict.fromkeys(stack.services) | {"migrate": 0}


def test_only_who_has_the_token_gets_an_answer_of_ray(stack: Stack) -> None:
    def both() -> bool:
        with suppress(OSError):  # the head is healthy before its dashboard listens; meanwhile refused, or reset
            nodes = ask(stack, "/nodes?view=summary")["data"]["summary"]
            return [node["raylet"]["state"] for node in nodes] == ["ALIVE"] * 2
        return False

    wait_for(both, 60)
    for token in ("", "0" * 64):
        with pytest.raises(urllib.error.HTTPError, match=r"401|403"):
            ask(stack, "/nodes?view=summary", token=token)


def test_a_stopped_job_is_resumed_without_the_volume_of_the_head(stack: Stack, as_owner: Store) -> None:
    """And the dashboard shows it, as a role that can read alone."""
    lasting = (
        "slow_s=15",
        "deadlines.point_s=90",
    )  # seen running on a loaded machine, and not out of time when resumed
    settings = ("behaviours=[ok, slow]", *lasting, "resources.workers=1", "isolation=warm")
    told = submit(stack, "jobs/configs/drill.yaml", *(x for one in settings for x in ("--set", one)), wait=False)
    job = re.search(r"raysubmit_\w+", told)
    assert job is not None

    def log() -> str:
        return ask(stack, f"/api/jobs/{job[0]}/logs")["logs"]

    wait_for(
        lambda: any(states(as_owner, run) == [("ok", 1), ("running", 1)] for run in runs(as_owner)), 100, log, pause=0.5
    )
    [run] = runs(as_owner)
    roles = "SELECT DISTINCT usename, usesuper FROM pg_stat_activity JOIN pg_user USING (usename) WHERE client_addr = "
    assert as_superuser(stack, f"{roles} '127.0.0.1'") == [("nsa", False)]
    ask(stack, f"/api/jobs/{job[0]}/stop", method="POST")
    wait_for(lambda: states(as_owner, run) == [("ok", 1), ("cancelled", 1)], 20, pause=0.5)

    artifacts = Path(stack.environment("ray-head")["NSA_ARTIFACTS"])
    assert (artifacts / run / "journal.jsonl").is_file()
    shutil.rmtree(artifacts)
    head = stack.environment("ray-head")
    command = [str(shutil.which("nsa", path=head["PATH"])), "export", run, "--journal"]
    subprocess.run(command, cwd=ROOT, env=head, check=True, timeout=120)
    submit(stack, "--resume", run)
    assert states(as_owner, run) == [("ok", 1), ("ok", 2)]

    env = stack.environment("dashboard")
    shown = subprocess.run(
        [str(shutil.which("python", path=env["PATH"])), "-c", SHOW], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert run in shown.stdout, shown.stderr
    with Store.open(env["NSA_DATABASE_URL"]) as store, pytest.raises(StoreError, match="permission denied"):
        delete_runs(store)
    assert runs(as_owner) == [run]


def test_nobody_comes_over_the_network_as_the_superuser(stack: Stack) -> None:
    """Nor without a password."""
    owner = stack.environment("ray-head")["NSA_DATABASE_URL"]
    superuser = stack.environment("postgres")["POSTGRES_USER"]
    with pytest.raises(StoreError, match="password authentication failed"):
        Store.open(owner.replace("://nsa:", f"://{superuser}:"))
    with pytest.raises(StoreError, match="no password supplied"):
        Store.open(owner.replace(f":{stack.secrets['POSTGRES_PASSWORD']}@", "@"))
