"""Real Ray clusters of a test's own, on loopback and with folders of their own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import free_ports, is_alive, wait_for

BIN = Path(sys.executable).parent
_PORTS = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port")
FEW_WORKERS = {  # of a node's processes, each of which takes seconds of the processor to start
    "RAY_worker_niceness": "0",  # else 15: whatever runs beside the tests would come first
    "RAY_prestart_worker_first_driver": "0",  # those would lack a job's environment: none would be used
    "RAY_worker_maximum_startup_concurrency": "1",  # else a job's first task starts a second process, which stays idle
    "RAY_idle_worker_killing_time_threshold_ms": "30000",  # else that of a probe may end before the job's first point
}


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        address, dashboard: of its head, for drivers and for `ray job`.
        folder: Ray's files.
    """

    address: str
    dashboard: str
    folder: Path

    def env(self, home: Path) -> dict[str, str]:
        """Environment of a client of this cluster alone, with results in `home`."""
        outside = ("RAY_", "NSA_")
        kept = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(outside)} | kept
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return clean | {"PATH": path, "NSA_RAY_ADDRESS": self.address, "NSA_HOME": str(home), "OMP_NUM_THREADS": "1"}


@contextmanager
def running_cluster(cpus: int, gpus: int, card: str) -> Iterator[Cluster]:
    """A cluster of one node with pretended GPUs of a type."""
    folder = Path(tempfile.mkdtemp(prefix="nsa-ray-"))  # short: Ray's socket paths must fit 107 characters
    port, dashboard = free_ports(2)
    found = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", folder)
    options = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}"]
    options += ["--disable-usage-stats", "--no-monitor"]  # there is no autoscaler
    options += [f"--num-cpus={cpus}", f"--num-gpus={gpus}", f'--resources={{"accelerator_type:{card}": 1}}']
    head = start_node(folder / "head.log", found.env(folder) | FEW_WORKERS, *options)
    try:
        wait_for(lambda: _answers(found), 60, lambda: (folder / "head.log").read_text())
        yield found
    finally:
        stop_node(head, patience_s=0)  # who holds a job's actors waits for them: 20 s after a training on ranks
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_node(cluster: Cluster, name: str, cpus: int, *options: str, **variables: str) -> Iterator[None]:
    """One more node of a cluster, on this host, with options of `ray start` and environment variables."""
    before = _living_nodes(cluster)
    place = cluster.folder / name  # of its own: a node unpacks a job's sources anew, though the job runs from them
    log = cluster.folder / f"{name}.log"
    start = [f"--address={cluster.address}", f"--num-cpus={cpus}", f"--temp-dir={place}", *options]
    node = start_node(log, cluster.env(cluster.folder) | FEW_WORKERS | variables, *start)
    try:
        wait_for(lambda: _living_nodes(cluster) == before + 1, 60, log.read_text)
        yield
    finally:
        stop_node(node)
        wait_for(lambda: _living_nodes(cluster) == before, 60)


def start_node(log: Path, env: Mapping[str, str], *options: str) -> subprocess.Popen[bytes]:
    """Start a node of this host on loopback, with ports of its own."""
    command = ["ray", "start", "--block", "--object-store-memory=100000000", "--node-ip-address=127.0.0.1", *options]
    command += [f"--{name}={port}" for name, port in zip(_PORTS, free_ports(len(_PORTS)), strict=True)]
    with log.open("w") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)


def point_processes(cluster: Cluster) -> list[psutil.Process]:
    """Processes on the cluster that measure points: children of Ray's workers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "orchestrator.execute.point:answer" in (process.info["cmdline"] or []):
            with suppress(psutil.NoSuchProcess):  # it may end meanwhile
                raylet = [*process.parents(), None, None][1]
                if raylet and str(cluster.folder) in " ".join(raylet.cmdline()):
                    found.append(process)
    return found


def stop_node(node: subprocess.Popen[bytes], patience_s: float = 20) -> None:
    """End what `ray start --block` started: it stops its own; `ray stop` would stop every cluster of the host.

    Args:
        patience_s: until those of its processes that are left are killed.
    """
    with suppress(psutil.NoSuchProcess):  # it may have ended by itself
        main = psutil.Process(node.pid)
        family = [main, *main.children(recursive=True)]
        main.terminate()
        deadline = time.monotonic() + patience_s
        while (left := [process for process in family if is_alive(process)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with suppress(psutil.NoSuchProcess):  # it may end between the wait and the kill
                process.kill()
        wait_for(lambda: not any(map(is_alive, left)))  # else one may still write to the folder that is removed next
    node.wait(timeout=20)


def _answers(cluster: Cluster) -> bool:
    """Whether jobs can be submitted and the head's own node is there."""
    try:
        return isinstance(asked_for(cluster, "/api/jobs/"), list) and _living_nodes(cluster) == 1
    except OSError:
        return False


def _living_nodes(cluster: Cluster) -> int:
    """The number of nodes that live, as the head tells."""
    found = asked_for(cluster, "/api/v0/nodes")["data"]["result"]["result"]
    return sum(node["state"] == "ALIVE" for node in found)


def asked_for(cluster: Cluster, path: str, method: str = "GET") -> Any:
    """The answer of the cluster's HTTP server; a client of Ray's would take seconds of the processor to start."""
    token = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    request = urllib.request.Request(cluster.dashboard + path, headers=token, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)
