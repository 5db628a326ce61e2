"""`nsa up`, both ways to submit, `logs` and `cancel`, as a user types them; and who else shares the host."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from processes import free_ports, wait_for
from ray_clusters import BIN, FEW_WORKERS

from orchestrator import provenance
from orchestrator.cli import services
from orchestrator.execute import ray_access
from orchestrator.settings import Settings
from orchestrator.store import Store, queries

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]
DRILL = "jobs/configs/drill.yaml"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class User:
    """Who has run `nsa up` for the first time, and has set nothing of ours but ports."""

    home: Path
    env: dict[str, str]

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = self.env | more
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)

    def last(self) -> dict[str, Any]:
        with Store.open(f"sqlite:///{self.home}/nsa/nsa.db", readonly=True) as store:
            return dict(queries.run(store, queries.runs(store, limit=1)["run_id"][0]) or {})


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    home = Path(tempfile.mkdtemp(prefix="nsa-home-"))
    home.chmod(0o755)  # everyone may enter it: what refuses them is within
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NSA_"))}
    clean |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "RAY_TMPDIR": str(home)}
    clean["STREAMLIT_GLOBAL_DEVELOPMENT_MODE"] = "true"  # in which Streamlit refuses a port
    made = User(home, clean | {"NSA_HOME": str(home / "nsa")} | _own_ports())
    up = made.run("nsa", "up", "--num-cpus=2", **FEW_WORKERS)
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert "warning" not in up.stderr
        assert f"token: {made.home}/.ray/auth_token; " in up.stdout
        yield made
        assert made.run("nsa", "down").stdout == "stopped: dashboard, ray\n"
        assert not list(home.glob("nsa-ray-*"))
        assert not any(one.healthy or one.pid for one in services.local_services(settings(made)))
    finally:
        services.down(settings(made))
        shutil.rmtree(home, ignore_errors=True)


def _own_ports() -> dict[str, str]:
    ray, dashboard, *metrics = free_ports(4)
    # Ray's usual ones for metrics are fixed: of two clusters of a host the second would be without.
    fixed = {f"{name}_METRIC_PORT": str(port) for name, port in zip(("AUTOSCALER", "DASHBOARD"), metrics, strict=True)}
    return fixed | {"NSA_RAY_DASHBOARD": f"http://127.0.0.1:{ray}", "NSA_DASHBOARD_PORT": str(dashboard)}


def settings(user: User) -> Settings:
    port = int(user.env["NSA_DASHBOARD_PORT"])
    return Settings(home=Path(user.env["NSA_HOME"]), ray_dashboard=user.env["NSA_RAY_DASHBOARD"], dashboard_port=port)


def test_two_clusters_answer_keep_their_jobs_and_leave_nothing(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hands a job the address noted in its cluster's folder: two clusters need two folders."""
    other = User(user.home, user.env | {"NSA_HOME": str(user.home / "nsa" / "b")} | _own_ports())
    try:
        up = other.run("nsa", "up", "--num-cpus=1", **FEW_WORKERS)
        assert up.returncode == 0, up.stdout + up.stderr
        processes = [path.read_text() for path in (user.home / "nsa").glob("**/*.pid.json")]
        assert len(processes) == 4
        assert user.run("nsa", "up", "--num-cpus=2").returncode == 0
        assert [path.read_text() for path in (user.home / "nsa").glob("**/*.pid.json")] == processes, (
            "it starts nothing"
        )
        with ThreadPoolExecutor() as pool:
            first, second = pool.map(_address_in_a_job, (user, other))
        assert first != second
        monkeypatch.setenv("RAY_TMPDIR", str(user.home))
        found = [ray_access.local_address(settings(one)) for one in (user, other)]  # by a driver that is no job
        assert found == [first, second]
        assert len(list(user.home.glob("nsa-ray-*"))) == 2
    finally:
        down = other.run("nsa", "down")
    assert down.stdout == "stopped: dashboard, ray\n"
    assert len(list(user.home.glob("nsa-ray-*"))) == 1
    assert [one.healthy for one in services.local_services(settings(user))] == [True, True]


def _address_in_a_job(user: User) -> str:
    command = ["ray", "job", "submit", "--address", user.env["NSA_RAY_DASHBOARD"], "--", "printenv", "RAY_ADDRESS"]
    done = user.run(*command)
    return re.findall(r"^[\d.]+:\d+$", done.stdout, re.MULTILINE)[0]


def test_nsa_submit_waits_and_its_log_stays(user: User) -> None:
    done = user.run("nsa", "submit", DRILL, "--set", "behaviours=[ok, raise]")
    assert done.returncode == 1, done.stdout + done.stderr  # a point failed, on purpose
    assert "raised on purpose" in done.stdout
    assert re.search(r"^submitted \S+ \(upload: [0-4]\.\d\d MiB\)$", done.stdout, re.MULTILINE)  # sources and spec only
    run = user.last()
    assert (run["ok"], run["failed"]) == (1, 1)
    state = provenance.git_state()
    assert (run["git_commit"], run["git_branch"]) == (state.commit, state.branch)
    assert run["code_hash"] == provenance.code_hash()
    assert "raised on purpose" in user.run("nsa", "logs", "last").stdout


def test_ray_job_submit_needs_no_setting_of_its_own_and_cancel_ends_its_run(user: User) -> None:
    before = user.last()["run_id"]
    submit = ["ray", "job", "submit", "--no-wait", "--address", user.env["NSA_RAY_DASHBOARD"], "--working-dir", "."]
    changes = ("behaviours=[ok, timeout, ok]", "deadlines.point_s=600", "resources.workers=1")
    settings = [item for change in changes for item in ("--set", change)]
    done = user.run(*submit, "--", "python", "-m", "jobs", DRILL, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: (run := user.last())["run_id"] != before and run["ok"] and run["running"] > 0, 90, pause=0.5)
    assert user.last()["git_commit"] == provenance.git_state().commit, (
        "of the checkout beside the copy that Ray unpacked"
    )
    assert "stopping" in user.run("nsa", "cancel", "last").stdout
    wait_for(lambda: user.last()["state"] == "cancelled", 60, pause=0.5)
    assert (user.last()["ok"], user.last()["cancelled"]) == (1, 2)


def test_resolve_asks_the_cluster_for_its_nodes(user: User) -> None:
    dry = user.run("nsa", "resolve", "linear-scaling", "--dry-run")
    assert dry.returncode == 3, dry.stdout + dry.stderr
    assert dry.stdout.count("would run: nsa submit jobs/configs/demo.yaml") == 1
    assert "needs a node with 1× H100; this cluster has no GPU" in dry.stdout


# Those who share the host


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
    token = "b" * 64
    url = f"{user.env['NSA_RAY_DASHBOARD']}/api/jobs/"
    with pytest.raises(urllib.error.HTTPError, match=r"401|403"):
        urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=10)
    ours = user.run("nsa", "submit", "--no-wait", DRILL, HOME=str(tmp_path), RAY_AUTH_TOKEN=token)
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
    done = user.run("ray", "job", "list", "--address", user.env["NSA_RAY_DASHBOARD"], RAY_AUTH_MODE="token")
    assert done.returncode == 0, done.stdout + done.stderr
