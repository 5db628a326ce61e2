"""`nsa up` against those who share the host: token, ports and folder; and plain `ray` commands of its owner."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from processes import free_ports

from orchestrator.cli import services
from orchestrator.settings import Settings

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]
NSA = (sys.executable, "-c", "from orchestrator.cli.commands import main; main()")
RAY = (sys.executable, "-m", "ray.scripts.scripts")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class User:
    """Who has run `nsa up` for the first time, and has set nothing but ports."""

    home: Path
    env: dict[str, str]

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = self.env | more
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    home = Path(tempfile.mkdtemp(prefix="nsa-home-"))
    home.chmod(0o755)  # everyone may enter it: what refuses them is within
    ray, dashboard, *metrics = free_ports(4)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NSA_"))}
    clean |= {"HOME": str(home), "NSA_HOME": str(home / "nsa"), "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(home)}
    clean |= {"NSA_RAY_DASHBOARD": f"http://127.0.0.1:{ray}", "NSA_DASHBOARD_PORT": str(dashboard)}
    # Ray's usual ones are fixed: of two clusters of a host the second would be without.
    clean |= {f"{name}_METRIC_PORT": str(port) for name, port in zip(("AUTOSCALER", "DASHBOARD"), metrics, strict=True)}
    made = User(home, clean)
    up = made.run(*NSA, "up", "--num-cpus=1")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert "warning" not in up.stderr
        assert f"token: {made.home}/.ray/auth_token; " in up.stdout
        yield made
    finally:
        services.down(settings(made))
        shutil.rmtree(home, ignore_errors=True)


def settings(user: User) -> Settings:
    return Settings(home=user.home / "nsa", ray_dashboard=user.env["NSA_RAY_DASHBOARD"])


def test_the_token_and_the_folder_are_the_owners_alone(user: User) -> None:
    token = user.home / ".ray" / "auth_token"
    assert re.fullmatch("[0-9a-f]{64}", token.read_text())
    (folder,) = user.home.glob("nsa-ray-*")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent, folder)] == [0o600, 0o700, 0o700]
    assert (folder / "r" / "ray_current_cluster").exists()


def test_every_port_is_on_loopback_and_refuses_those_without_the_token(user: User) -> None:
    """Ray's Prometheus metrics alone are for everyone on the host (docs/security.md)."""
    ray = services.local_services(settings(user))[0]
    family = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
    found = set[Any]()
    for process in family:
        with suppress(psutil.NoSuchProcess):  # some are short commands
            found |= {one.laddr for one in process.net_connections("tcp") if one.status == "LISTEN"}
    assert len(found) > 8
    assert {address.ip.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}
    assert sorted(_welcome(address.port) for address in found) == ["metrics"] * 3 + ["refused"] * (len(found) - 3)


def _welcome(port: int) -> str:
    """How a port receives one who has no token, by HTTP and by gRPC: refused, metrics, or what it says."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/jobs/", timeout=5) as answer:
            return "metrics" if answer.read().startswith(b"# HELP") else "open by HTTP"
    except urllib.error.HTTPError as err:
        return "refused" if err.code == 401 else f"HTTP {err.code}"
    except (OSError, http.client.HTTPException):  # it speaks gRPC
        pass
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        said = []
        for method in METHODS:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=10)
                said.append(f"{method} is open")
            except grpc.RpcError as err:
                said.append(err.code().name)  # pyright: ignore[reportAttributeAccessIssue] - every RpcError is a Call
    return "refused" if "UNAUTHENTICATED" in said and set(said) <= {"UNAUTHENTICATED", "UNIMPLEMENTED"} else str(said)


METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",  # the head's
    "InternalKVGcsService/InternalKVGet",
    "NodeManagerService/GetNodeStats",  # the raylet's
    "ObjectManagerService/Pull",
    "ReporterService/GetTraceback",  # the agent's
    "RayletDriver/ClusterInfo",  # Ray Client's
    "CoreWorkerService/PushTask",  # a worker's
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_nothing(user: User) -> None:
    (folder,) = user.home.glob("nsa-ray-*")
    url = f"{user.env['NSA_RAY_DASHBOARD']}/api/jobs/"
    job = urllib.request.Request(url, b'{"entrypoint": "id"}', {"Content-Type": "application/json"}, method="POST")
    attacks: dict[str, Callable[[], object]] = {
        "enter the home": lambda: os.listdir(user.home),  # which is open: the rest is not refused for its sake
        "read the token": lambda: (user.home / ".ray" / "auth_token").read_bytes(),
        "replace the token": lambda: (user.home / ".ray" / "auth_token").write_bytes(b"mine"),
        "read uploads": lambda: os.listdir(folder / "r" / "session_latest" / "runtime_resources"),
        "the raylet's socket": lambda: _connect(folder / "r" / "session_latest" / "sockets" / "raylet"),
        "read the environment": lambda: Path(
            f"/proc/{services.local_services(settings(user))[0].pid}/environ"
        ).read_bytes(),
        "list jobs": lambda: urllib.request.urlopen(url, timeout=10).read(),
        "submit a job": lambda: urllib.request.urlopen(job, timeout=10).read(),
    }
    outcomes = {name: _as_nobody(attack) for name, attack in attacks.items()}
    assert outcomes.pop("enter the home") == "done"
    http = {"list jobs", "submit a job"}
    assert outcomes == {name: "HTTPError 401" if name in http else "PermissionError" for name in outcomes}


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def _as_nobody(attack: Callable[[], object]) -> str:
    """How an attack ends in a child process with the rights of another user."""
    source, sink = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            attack()
            os.write(sink, b"done")
        except urllib.error.HTTPError as err:
            os.write(sink, f"HTTPError {err.code}".encode())
        except BaseException as err:
            os.write(sink, type(err).__name__.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(sink)
    with os.fdopen(source) as said:
        return said.read()


def test_a_job_with_another_token_is_refused(user: User, tmp_path: Path) -> None:
    token = {"RAY_AUTH_TOKEN": "b" * 64}
    address = ("--address", user.env["NSA_RAY_DASHBOARD"])
    plain = user.run(*RAY, "job", "submit", *address, "--", "id", HOME=str(tmp_path), RAY_AUTH_MODE="token", **token)
    assert plain.returncode != 0
    assert "Authentication" in plain.stdout + plain.stderr
    ours = user.run(*NSA, "submit", "--no-wait", "jobs/configs/drill.yaml", HOME=str(tmp_path), **token)
    assert ours.returncode == 2
    assert re.fullmatch(r"error: RAY_AUTH_TOKEN: the cluster at \S+ asks for another token .*\n", ours.stderr)


def test_the_owner_needs_no_setting_but_what_the_environment_of_make_sets(user: User) -> None:
    """The line that docker/install.sh leaves in site-packages, where Python runs it at each start."""
    line = re.search(r"^import os; .*$", (ROOT / "docker" / "install.sh").read_text(), re.MULTILINE)
    assert line is not None
    print_mode = f"{line[0]}\nprint(os.environ.get('RAY_AUTH_MODE'))"
    assert user.run(sys.executable, "-S", "-c", print_mode).stdout == "token\n"
    assert user.run(sys.executable, "-S", "-c", print_mode, RAY_AUTH_MODE="disabled").stdout == "disabled\n"
    assert user.run(sys.executable, "-S", "-c", print_mode, HOME="/nonexistent").stdout == "None\n"
    done = user.run(*RAY, "job", "list", "--address", user.env["NSA_RAY_DASHBOARD"], RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stdout + done.stderr
