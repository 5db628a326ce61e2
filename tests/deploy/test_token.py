"""The compose file's RAY_AUTH_MODE=token on a real head: jobs are accepted with the token and refused without it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_ports

from orchestrator.cli import services
from orchestrator.settings import Settings

TOKEN = "a" * 64


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray head that requires TOKEN."""
    home = tmp_path_factory.mktemp("token")
    settings = Settings(home=home, ray_dashboard=f"http://127.0.0.1:{free_ports(1)[0]}")
    ray = services.local_services(settings, "--num-cpus=1")[0]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with (home / "ray.log").open("wb") as log:
        process = subprocess.Popen(ray.command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not services.answers(ray.health) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        yield settings.ray_dashboard
    finally:
        process.terminate()
        process.wait(60)


def list_jobs(head: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ray job list` as a user whose home holds no token."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "list", "--address", head],
        env={**known, "HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.ray
def test_a_client_without_the_token_is_refused(head: str, tmp_path: Path) -> None:
    done = list_jobs(head, tmp_path)
    assert done.returncode != 0
    assert "401" in done.stdout + done.stderr or "auth" in (done.stdout + done.stderr).lower()


@pytest.mark.ray
def test_a_client_with_the_token_is_served(head: str, tmp_path: Path) -> None:
    done = list_jobs(head, tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
