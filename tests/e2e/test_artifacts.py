"""A large file on its way: from a point on a two-node Ray cluster to a store of another scheme, and back to readers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ftp_server import FtpServer, ftp_server
from processes import free_ports
from ray_clusters import FEW_WORKERS, stop_node

from dashboard import data
from orchestrator.store import journal
from orchestrator.store.records import ArtifactData, ArtifactRecord, EventRecord, OutcomeRecord, RunRecord

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
KINDS = ROOT / "tests" / "orchestrator" / "kinds"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

_SPEC = """
kind: snippet
name: files
codes: {codes}
retries: 0
resources: {{workers: 2, num_cpus: 1}}
deadlines: {{startup_s: 60, heartbeat_s: 60, point_s: 120}}
"""
_LARGE = """
import hashlib, pathlib, tempfile, time
time.sleep(6)  # the small point ends first
path, digest = pathlib.Path(tempfile.mkdtemp()) / 'trace.bin', hashlib.sha256()
with path.open('wb') as file:
    for _ in range(200):
        piece = os.urandom(1 << 20)
        digest.update(piece)
        file.write(piece)
print(digest.hexdigest())
files = {'trace.bin': path, '..': 'up', 'a/b': 'aside', 'notes.txt': 'kept'}
"""
_SMALL = "import time; time.sleep(3); files = {'notes.txt': 'kept'}"  # while it runs, the other node has room


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "ftp") as found:
        yield found


@pytest.fixture
def env(tmp_path: Path, server: FtpServer) -> Iterator[dict[str, str]]:
    """Environment of a client of a cluster of two nodes, each with one core."""
    folder = Path(tempfile.mkdtemp(prefix="nsa-ray-"))  # short: Ray's socket paths must fit 107 characters
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NSA_"))}
    clean |= {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
    clean |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(KINDS), "OMP_NUM_THREADS": "1"}
    clean |= FEW_WORKERS
    ports = free_ports(7)
    address = f"127.0.0.1:{ports[0]}"
    common = ["ray", "start", "--block", "--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"]
    common += ["--object-store-memory=100000000", "--node-ip-address=127.0.0.1"]
    head = [*common, "--head", "--no-monitor", f"--port={ports[0]}", f"--dashboard-port={ports[1]}"]
    head += _agent_ports(ports[2:4])
    nodes = [head, [*common, f"--address={address}", *_agent_ports(ports[4:6])]]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(nodes):
            place = folder / str(number)  # of its own: nodes unpack the sources there
            place.mkdir()
            with (place / "log").open("w") as log:
                command = [*command, f"--temp-dir={place}"]
                started.append(subprocess.Popen(command, env=clean, stdout=log, stderr=log, start_new_session=True))
            _await_node(place / "log")
        yield clean | {
            "NSA_RAY_ADDRESS": address,
            "NSA_HOME": str(tmp_path / "home"),
            "NSA_ARTIFACT_STORE": server.url,
        }
    finally:
        for process in reversed(started):
            stop_node(process)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_large_file_reaches_the_store_and_its_readers(env, tmp_path, monkeypatch) -> None:
    records, grown = measure(env, tmp_path, [_LARGE, _SMALL])
    assert "2 points to measure on cpu" in (told := (tmp_path / "driver.log").read_text())
    assert "2 at a time" in told  # one on each node
    assert grown < 50 << 20, f"{grown >> 20} MiB"

    outcomes = [record for record in records if isinstance(record, OutcomeRecord)]
    assert [str(outcome.state) for outcome in outcomes] == ["ok", "ok"]
    kept = {(r.point_id[-1], r.artifact.name): r.artifact for r in records if isinstance(r, ArtifactRecord)}
    assert sorted(kept) == [("0", "notes.txt"), ("0", "stdout.txt"), ("0", "trace.bin"), ("1", "notes.txt")]
    refused = [record for record in records if isinstance(record, EventRecord)]
    assert [(event.point_id or "")[-1] for event in refused] == ["0", "0"]
    assert {name for name in ("'..'", "'a/b'") if any(name in event.message for event in refused)} == {"'..'", "'a/b'"}
    large = kept["0", "trace.bin"]
    assert (large.size, large.content) == (200 << 20, None)
    assert large.sha256 == str(kept["0", "stdout.txt"].content).strip()  # as the point itself counted

    for name, value in env.items():
        if name.startswith("NSA_"):
            monkeypatch.setenv(name, value)
    assert hashlib.sha256(data.artifact(large.path, large.size, large.sha256, "")).hexdigest() == large.sha256
    assert copied(env, tmp_path, records[0], large) == large.sha256


def measure(env: dict[str, str], folder: Path, codes: list[str]) -> tuple[list, int]:
    """The records of a run of `codes`, and the growth of its driver's memory in bytes after its first outcome.

    Up to the run's end: before and after, the driver imports what it needs to connect and to judge.
    """
    spec = folder / "spec.yaml"
    spec.write_text(_SPEC.format(codes=codes))
    with (folder / "driver.log").open("w") as log:
        command = [sys.executable, "-m", "jobs", str(spec)]
        driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        watched, first, peak = psutil.Process(driver.pid), 0, 0
        while driver.poll() is None:
            try:
                rss = watched.memory_info().rss
            except psutil.NoSuchProcess:
                break
            told = "".join(path.read_text() for path in _journals(env))
            if '"type":"outcome"' in told and '"type":"run_end"' not in told:
                first, peak = first or rss, max(peak, rss)
            time.sleep(0.05)
    assert driver.wait() == 0, (folder / "driver.log").read_text()
    assert first
    [path] = _journals(env)
    return list(journal.read(path)), peak - first


def copied(env: dict[str, str], folder: Path, run: RunRecord, file: ArtifactData) -> str:
    """The hash of a file that `nsa artifacts --out` copied."""
    out = folder / "copies"
    nsa = [sys.executable, "-c", "from orchestrator.cli.commands import main; main()"]
    command = [*nsa, "artifacts", run.run_id, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.sha256[:8] in done.stdout
    digest = hashlib.sha256()
    with (out / "0000" / "1" / file.name).open("rb") as copy:
        while piece := copy.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _journals(env: dict[str, str]) -> set[Path]:
    return set(Path(env["NSA_HOME"]).glob(f"artifacts/*/{journal.NAME}"))


def _agent_ports(ports: list[int]) -> list[str]:
    return [f"--dashboard-agent-listen-port={ports[0]}", f"--metrics-export-port={ports[1]}"]


def _await_node(log: Path) -> None:
    deadline = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
