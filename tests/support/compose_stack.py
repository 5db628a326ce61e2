"""docker-compose.yml without Docker: its services as processes on loopback, in its order, with its health checks.

Commands, environments, conditions and health checks are the file's own. Its values that name a container, its network
or its file system are replaced by the table in `_counterparts`; the images are this checkout with the variables of its
Dockerfile, and `postgres_entrypoint.sh`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from postgres_process import BINARIES, identity
from processes import free_ports
from ray_clusters import BIN, stop_node

ROOT = Path(__file__).resolve().parents[2]
_PORTS = ("5432", "6379", "8265", "8501")
_ENTRYPOINT = ROOT / "tests" / "deploy" / "postgres_entrypoint.sh"
_INIT = "/docker-entrypoint-initdb.d/"


def _counterparts(folder: Path, ports: Mapping[str, int]) -> dict[str, str]:
    """Each text that names a container, its network or its file system, and what stands for it on this host."""
    return {
        "@postgres:": "@127.0.0.1:",
        "ray-head:": "127.0.0.1:",
        "0.0.0.0": "127.0.0.1",
        "/data": str(folder / "data"),
        **{port: str(found) for port, found in ports.items()},
    }


def _own_network(command: list[str], folder: Path) -> list[str]:
    """Options of `ray start` that several nodes of one host need, and `shm_size`."""
    if command[:2] != ["ray", "start"]:
        return []
    any_port = ["dashboard-agent-listen-port", "min-worker-port", "max-worker-port"]
    options = ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000", *(f"--{name}=0" for name in any_port)]
    if "--head" in command:
        return [*options, f"--temp-dir={folder / 'r'}", f"--ray-client-server-port={free_ports(1)[0]}"]
    return [*options, f"--temp-dir={folder / 'w'}"]  # as containers have: a node unpacks a job's sources anew


@dataclass
class Stack:
    """The services of docker-compose.yml.

    Attributes:
        folder: of volumes and logs.
        secrets: the variables of `.env`.
        events: what happened in order, "SERVICE started" and "SERVICE CONDITION".
    """

    folder: Path
    secrets: Mapping[str, str]
    services: Mapping[str, Mapping[str, Any]]
    counterparts: Mapping[str, str]
    events: list[str] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _deadlines: dict[str, float] = field(default_factory=dict)

    def here(self, text: str) -> str:
        """A text of the file, or of its documentation, as it is on this host."""
        pattern = "|".join(map(re.escape, self.counterparts))
        mapped = re.sub(pattern, lambda found: self.counterparts[found[0]], text)
        return re.sub(r"\$\{(\w+)(?::([-?])([^}]*))?\}", self._variable, mapped)

    def environment(self, name: str) -> dict[str, str]:
        """The environment of a service: its image's, then its own, and nothing of this process's but the PATH."""
        given = self.services[name].get("environment", {})
        return self._of_image(name) | {key: self.here(str(value)) for key, value in given.items()}

    def up(self) -> None:
        """Start each service once the conditions of its `depends_on` hold, until all are healthy or have ended."""
        while open_ends := [name for name in self.services if self._open(name)]:
            for name in open_ends:
                if name in self.processes:
                    self._look(name)
                elif all(f"{on} {how['condition']}" in self.events for on, how in self._dependencies(name).items()):
                    self._start(name)
            time.sleep(0.2)

    def down(self) -> None:
        """End what runs; Postgres does once its clients have."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(stop_node, self.processes.values()))

    def log(self, name: str) -> str:
        return f"{name}: " + (self.folder / f"{name}.log").read_text()

    def _dependencies(self, name: str) -> Mapping[str, Mapping[str, str]]:
        return self.services[name].get("depends_on", {})

    def _open(self, name: str) -> bool:
        return not {f"{name} service_healthy", f"{name} service_completed_successfully"} & set(self.events)

    def _start(self, name: str) -> None:
        command = shlex.split(self.here(self.services[name].get("command", "")))
        if command:
            command, options = command + _own_network(command, self.folder), {}
        else:
            command, options = ["bash", str(self.folder / "entrypoint.sh")], identity(self.folder / "postgres")
        env = self.environment(name)
        program = shutil.which(command[0], path=env["PATH"])
        assert program is not None, command
        with (self.folder / f"{name}.log").open("w") as log:
            self.processes[name] = subprocess.Popen(
                [program, *command[1:]], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True, **options
            )
        self._deadlines[name] = time.monotonic() + self._patience(name)
        self.events.append(f"{name} started")

    def _look(self, name: str) -> None:
        """Note a service's health, or its end; fail if it is too late for either."""
        ended, check = self.processes[name].poll(), self.services[name].get("healthcheck")
        assert time.monotonic() < self._deadlines[name], self.log(name)
        if check is None:
            assert ended in (None, 0), self.log(name)
            if ended == 0:
                self.events.append(f"{name} service_completed_successfully")
            return
        assert ended is None, self.log(name)
        how, *command = map(self.here, check["test"])
        assert how == "CMD"
        env, limit = self.environment(name), _seconds(check["timeout"])
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=limit, check=True)
            self.events.append(f"{name} service_healthy")

    def _patience(self, name: str) -> float:
        """The seconds after which Docker takes a service for unhealthy; a minute for one that ends."""
        check = self.services[name].get("healthcheck")
        if check is None:
            return 60
        return _seconds(check.get("start_period", "0s")) + _seconds(check["interval"]) * check["retries"]

    def _of_image(self, name: str) -> dict[str, str]:
        path = os.environ["PATH"]
        if "command" not in self.services[name]:  # the image of Postgres
            home, scripts = self.folder / "postgres", self.folder / "init"
            env = {"PATH": f"{BINARIES}{os.pathsep}{path}", "PGHOST": str(home), "PGPORT": self.counterparts["5432"]}
            return env | {
                "PGDATA": str(home / "data"),
                "INIT_FOLDER": str(scripts),
                "ROLES_SQL": f"{scripts}/roles.psql",
            }
        block = re.search(r"^ENV ((?:.*\\\n)*.*)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
        assert block is not None
        env = dict(item.split("=", 1) for item in shlex.split(self.here(block[1].replace("\\\n", " "))))
        # The image's own interpreter and home, and its installed package.
        return env | {"PATH": f"{BIN}{os.pathsep}{path}", "HOME": str(self.folder), "PYTHONPATH": str(ROOT)}

    def _variable(self, found: re.Match[str]) -> str:
        """The value of `${NAME}`, `${NAME:-default}` or `${NAME:?error}`."""
        name, how, rest = found.groups()
        if value := self.secrets.get(name):
            return value
        assert how == "-", f"{name}: {rest}"
        return str(rest)


@contextmanager
def running_stack(secrets: Mapping[str, str]) -> Iterator[Stack]:
    """All services, up and healthy."""
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    folder = Path(tempfile.mkdtemp(prefix="nsa-up-"))  # short: Ray's socket paths must fit 107 characters
    folder.chmod(0o755)  # Postgres may run as another user
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    stack = Stack(folder, secrets, content["services"], _counterparts(folder, ports))
    for name in ("data", "init", "postgres"):
        (folder / name).mkdir()
    shutil.copy(_ENTRYPOINT, folder / "entrypoint.sh")
    for source, target in (volume.split(":")[:2] for volume in content["services"]["postgres"]["volumes"]):
        if target.startswith(_INIT):
            shutil.copy(ROOT / source, folder / "init" / target.removeprefix(_INIT))
    with ExitStack() as ends:
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        ends.callback(stack.down)
        stack.up()
        yield stack


def _seconds(text: str) -> float:
    return float(text.removesuffix("s"))
