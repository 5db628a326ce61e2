"""A cluster of three nodes on this host, whose nodes can be killed and come back."""

import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
from processes import free_ports, wait_for
from ray_clusters import Cluster, start_node, stop_node

_CPUS = 2
_HEAD = "head"
_OTHERS = ("node1", "node2")
_STARTED = "Ray runtime started"


class Nodes:
    """The nodes; only those of the same head know each other."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._env = env
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0
        self.cluster = self.start()

    def start(self) -> Cluster:
        """Start a head at a new address, and the other nodes."""
        self._starts += 1
        port, dashboard, client = free_ports(3)
        temp = self._folder / f"r{self._starts}"
        self.cluster = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", temp)
        head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
        self._start(_HEAD, *head, f"--temp-dir={temp}", "--disable-usage-stats")
        for name in _OTHERS:
            self.join(name)
        return self.cluster

    def join(self, name: str) -> None:
        """Start a node of the present head."""
        place = self.cluster.folder / name  # of its own: a node unpacks a job's sources anew, though the job runs there
        self._start(name, f"--address={self.cluster.address}", f"--temp-dir={place}")

    def kill_raylet(self, pick: float) -> str:
        """Kill the raylet of a node other than the head; return the node's name."""
        name = _OTHERS[int(pick * len(_OTHERS))]
        self._kill(name, "raylet")
        return name

    def kill_head(self) -> None:
        self._kill(_HEAD, "gcs_server", "raylet")

    def stop(self, name: str | None = None) -> None:
        """End a node, or all of them."""
        names = [name] if name else list(self._running)
        with ThreadPoolExecutor() as pool:
            list(pool.map(stop_node, [self._running.pop(each) for each in names if each in self._running]))

    @property
    def slots(self) -> int:
        """The number of points at a time."""
        return _CPUS * (1 + len(_OTHERS))

    def workers(self) -> list[psutil.Process]:
        """Ray's worker processes that have run, or run, a supervisor."""
        found = []
        for node in self._running.values():
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(node.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        if process.name().startswith("ray::") or "default_worker.py" in " ".join(process.cmdline()):
                            found.append(process)
        return found

    def _start(self, name: str, *options: str) -> None:
        log = self._folder / f"{name}.{self._starts}.{time.monotonic_ns()}.log"
        ports = ["--min-worker-port=0", "--max-worker-port=0"]
        process = self._running[name] = start_node(log, self._env, f"--num-cpus={_CPUS}", *ports, *options)
        wait_for(lambda: _STARTED in log.read_text() or process.poll() is not None, 120, log.read_text)
        assert process.poll() is None, log.read_text()

    def _kill(self, node: str, *programs: str) -> None:
        for process in psutil.Process(self._running[node].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.name() in programs:
                    process.kill()
