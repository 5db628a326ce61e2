"""docker-compose.yml, without a Docker daemon: its schema, and its promises in docs/deployment.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
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


def test_ray_requires_its_token_and_postgres_is_asked_over_tcp() -> None:
    assert all(SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token" for name in ("ray-head", "gpu-worker"))
    # The image's temporary server, which creates the data folder, answers on the socket alone.
    assert "--host=127.0.0.1" in SERVICES["postgres"]["healthcheck"]["test"]
