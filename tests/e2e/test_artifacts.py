"""A large file on its way: from a point on a two-node Ray cluster to a store of another scheme, and back to readers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ftp_server import FtpServer, ftp_server
from ray_clusters import running_cluster, running_node

from dashboard import data
from orchestrator.store import journal
from orchestrator.store.records import ArtifactRecord, EventRecord, OutcomeRecord

ROOT = Path(__file__).resolve().parents[2]
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
time.sleep(2)  # the small point ends first
path, digest = pathlib.Path(tempfile.mkdtemp()) / 'trace.bin', hashlib.sha256()
with path.open('wb') as file:
    for _ in range(100):
        piece = os.urandom(1 << 20)
        digest.update(piece)
        file.write(piece)
print(digest.hexdigest())
files = {'trace.bin': path, '..': 'up', 'a/b': 'aside', 'notes.txt': 'kept'}
"""
_SMALL = "import time; time.sleep(1); files = {'notes.txt': 'kept'}"  # while it runs, the other node has room


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FtpServer]:
    with ftp_server(tmp_path / "ftp") as found:
        yield found


@pytest.fixture
def env(tmp_path: Path, server: FtpServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Environment of a client of a cluster of two nodes, each with one core."""
    monkeypatch.setenv("PYTHONPATH", str(KINDS))
    with running_cluster(cpus=1) as cluster, running_node(cluster, "second", 1):
        yield cluster.env(tmp_path / "home") | {"NSA_ARTIFACT_STORE": server.url}


def test_a_large_file_reaches_the_store_and_its_readers(env, tmp_path, monkeypatch) -> None:
    records, grown = measure(env, tmp_path, [_LARGE, _SMALL])
    assert "2 points to measure on cpu" in (told := (tmp_path / "driver.log").read_text())
    assert "2 at a time" in told  # one on each node
    assert grown < 40 << 20, f"{grown >> 20} MiB"

    outcomes = [record for record in records if isinstance(record, OutcomeRecord)]
    assert [str(outcome.state) for outcome in outcomes] == ["ok", "ok"]
    kept = {(r.point_id[-1], r.artifact.name): r.artifact for r in records if isinstance(r, ArtifactRecord)}
    assert sorted(kept) == [("0", "notes.txt"), ("0", "stdout.txt"), ("0", "trace.bin"), ("1", "notes.txt")]
    refused = [record for record in records if isinstance(record, EventRecord)]
    assert [(event.point_id or "")[-1] for event in refused] == ["0", "0"]
    assert {name for name in ("'..'", "'a/b'") if any(name in event.message for event in refused)} == {"'..'", "'a/b'"}
    large = kept["0", "trace.bin"]
    assert (large.size, large.content) == (100 << 20, None)
    assert large.sha256 == str(kept["0", "stdout.txt"].content).strip()  # as the point itself counted

    for name, value in env.items():
        if name.startswith("NSA_"):
            monkeypatch.setenv(name, value)
    assert hashlib.sha256(data.artifact(large.path, large.size, large.sha256, "")).hexdigest() == large.sha256
    nsa = [sys.executable, "-c", "from orchestrator.cli.commands import main; main()"]
    command = [*nsa, "artifacts", records[0].run_id, "--out", str(tmp_path / "copies")]
    assert large.sha256[:8] in subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout
    copy = tmp_path / "copies" / "0000" / "1" / "trace.bin"
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == large.sha256


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


def _journals(env: dict[str, str]) -> set[Path]:
    return set(Path(env["NSA_HOME"]).glob(f"artifacts/*/{journal.NAME}"))
