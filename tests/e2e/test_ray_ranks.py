"""Ranks of a training as workers of Ray Train, on a real cluster with exactly the cores and pretended GPUs of two."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from homes import newest_checkpoint
from processes import wait_for
from ray_clusters import Cluster, point_processes, running_node
from trainings import Keeping, of_the_kill, trains_alike, write_text
from travelling import travelled

from jobs.process import temporary
from jobs.schema.point import Machine
from jobs.specs.load import load_spec
from jobs.train import Spec, measure
from orchestrator.database_url import StoreError
from orchestrator.store import Store, journal, queries
from orchestrator.store.records import ArtifactRecord, EventRecord, OutcomeRecord, Record, RunRecord, SeriesRecord

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

_SPEC = """
kind: train
name: ranks
device: cpu
seq_len: 32
batch: 8
ranks: 2
steps: 40
resources: {num_cpus: 2}
optimizer: {warmup_steps: 3, learning_rate: 0.01}
data: {path: TEXT, heldout: 0.2, heldout_batches: 2}
"""

_LEFT = """
import ray, sys
from ray._private.state import actors
from ray.util import placement_group_table
ray.init(sys.argv[1], log_to_driver=False)
for _ in sys.stdin:
    alive = [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"]
    alive = [name for name in alive if name != "_AutoscalingCoordinatorActor"]  # Ray's own, one a cluster
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    print(alive, groups, ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"], flush=True)
"""


@pytest.fixture(scope="module")
def left(cluster: Cluster) -> Iterator[Callable[[], str]]:
    """Function that tells of actors and placement groups that are left, and whether all cores are free.

    By one client of all tests, because each takes seconds of the processor to start.
    """
    command, env = [sys.executable, "-c", _LEFT, cluster.address], cluster.env(cluster.folder)
    env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    client = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    asked, answers = client.stdin, client.stdout
    assert asked is not None
    assert answers is not None

    def ask() -> str:
        print(file=asked, flush=True)
        return answers.readline()

    try:
        yield ask
    finally:
        client.communicate(timeout=60)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(_SPEC.replace("TEXT", str(write_text(tmp_path / "text"))))
    return path


def _folders() -> Iterator[Path]:
    """Temporary folders of ranks."""
    return Path(tempfile.gettempdir()).glob(f"{temporary.RANK}*")


@dataclass(frozen=True)
class Run:
    """A run that goes on, and its results."""

    driver: subprocess.Popen[str]
    home: Path

    def records(self) -> list[Record]:
        return [record for path in self.home.glob(f"artifacts/*/{journal.NAME}") for record in journal.read(path)]

    def outcomes(self) -> list[OutcomeRecord]:
        return [record for record in self.records() if isinstance(record, OutcomeRecord)]

    def progress(self, name: str) -> Any:
        """The `phase`, `done`, `total` or `rate` of the first point; None while there is none."""
        with suppress(StoreError), Store.open(f"sqlite:///{self.home / 'nsa.db'}", create=False) as store:
            found = [queries.points(store, record.run_id) for record in self.records() if isinstance(record, RunRecord)]
            return next((points[name].iloc[0] for points in found if len(points)), None)
        return None

    def stored(self) -> dict[tuple[str, int], int]:
        """The last step of each series by name and rank that the database has."""
        record = next(record for record in self.records() if isinstance(record, RunRecord))
        with Store.open(f"sqlite:///{self.home / 'nsa.db'}", create=False) as store:
            (point,) = queries.points(store, record.run_id)["point_id"]
            found = queries.series(store, point).groupby(["name", "rank"])["step"].max()
        return {(str(name), int(rank)): int(step) for (name, rank), step in found.items()}

    def until_trained(self, cluster: Cluster, point: int = 0) -> list[psutil.Process]:
        """Wait for the first samples of a point's loss. Returns the processes of its two ranks."""

        def trained() -> bool:
            assert self.driver.poll() is None, self.driver.communicate()[0]
            losses = [r for r in self.records() if isinstance(r, SeriesRecord) and r.name == "loss"]
            trained = any(r.point_id.endswith(f"/{point}") for r in losses)
            return trained and len(_processes(cluster, "ray::RayTrainWorker")) == 2

        wait_for(trained, 200, pause=0.2)
        return _processes(cluster, "ray::RayTrainWorker")

    def until_checkpoint(self, after: int = 0) -> int:
        """Wait for a complete checkpoint of a step beyond `after`. Returns its step."""
        wait_for(lambda: newest_checkpoint(self.home) > after, 200, lambda: str(self.records()), pause=0.2)
        return newest_checkpoint(self.home)

    def ended(self, code: int) -> OutcomeRecord:
        """Wait for the end. Returns the last outcome."""
        out, _ = self.driver.communicate(timeout=300)
        assert self.driver.returncode == code, out
        return self.outcomes()[-1]

    def file(self, name: str) -> str:
        """A file of the first point."""
        (record,) = [
            r
            for r in self.records()
            if isinstance(r, ArtifactRecord) and r.artifact.name == name and r.point_id.endswith("/0")
        ]
        return (next(self.home.glob("artifacts")) / record.artifact.path).read_text()


def _start(cluster: Cluster, home: Path, spec: Path, *changes: str, job: bool = False) -> Run:
    """Start a run, if `job` by `ray job submit`."""
    command = [sys.executable, "-m", "jobs", str(spec), *(item for change in changes for item in ("--set", change))]
    if job:
        env = json.dumps({"env_vars": {"NSA_HOME": str(home)}})
        submit = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", "."]
        command = [*submit, "--runtime-env-json", env, "--", "python", *command[1:]]
    driver = subprocess.Popen(
        command, cwd=ROOT, env=cluster.env(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Run(driver, home)


def _processes(cluster: Cluster, title: str) -> list[psutil.Process]:
    """Processes of a title that a node of the cluster started, the oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        with suppress(psutil.Error):
            parent = process.parent() if title in " ".join(process.info["cmdline"] or []) else None
            if parent and str(cluster.folder) in " ".join(parent.cmdline()):
                found.append(process)
    return sorted(found, key=lambda process: process.info["create_time"])


def _nothing_is_left(cluster: Cluster, left: Callable[[], str]) -> None:
    """Wait until no actor and no placement group is left, and all cores are free."""
    wait_for(lambda: left() == "[] [] True\n", 30, left)
    assert _processes(cluster, "ray::RayTrainWorker") == []


def _losses(metrics: Any) -> tuple[float, ...]:
    return next(tuple(metric.samples) for metric in metrics if metric.name == "loss")


def test_a_run_on_two_gpus_trains_as_one_rank_does(
    cluster: Cluster, left: Callable[[], str], spec: Path, tmp_path: Path
) -> None:
    run = _start(cluster, tmp_path / "home", spec, "resources={num_cpus: 2, num_gpus: 2}")
    end = run.ended(0)
    assert len(_losses(end.metrics)) == 40
    trains_alike(_losses(end.metrics), _of_one_rank(spec))
    assert end.environment["training"]["launcher"] == "ray-train"
    series = {(r.name, r.rank) for r in run.records() if isinstance(r, SeriesRecord)}
    assert {("loss", 0), ("training_memory", 1), ("cpu_utilization", 0), ("resident_memory", 1)} <= series
    _nothing_is_left(cluster, left)


def _of_one_rank(spec: Path) -> tuple[float, ...]:
    """The losses of the same training on one rank, in this process."""
    loaded = load_spec(spec, ["ranks=1"])
    assert isinstance(loaded, Spec)
    case = travelled(loaded.points(Machine("cpu", "test", 8 << 30))[0])
    return _losses(measure(case, Keeping()).metrics)


def test_a_submitted_run_has_a_rank_on_each_of_two_nodes_and_a_killed_one_resumes_from_the_checkpoint(
    cluster: Cluster, left: Callable[[], str], spec: Path, tmp_path: Path
) -> None:
    with running_node(cluster, "second", 2):
        changes = ["resources.num_cpus=4", "steps=100000", "checkpoints={every: 10}", "restarts=1"]
        run = _start(cluster, tmp_path / "home", spec, *changes, job=True)
        _, rank = run.until_trained(cluster)
        saved = run.until_checkpoint()
        rank.kill()
        wait_for(lambda: bool(_warnings(run)), 60)
        run.until_checkpoint(after=newest_checkpoint(run.home))
        assert len({process.ppid() for process in run.until_trained(cluster)}) == 2, "a raylet each"
        _grows(run)
        point_processes(cluster)[0].send_signal(signal.SIGTERM)
        end = run.ended(1)
        assert end.state == "cancelled"
        assert "go on from the checkpoint of step" in str(end.reason)
        warning = of_the_kill(_warnings(run))
        assert "of 2 died on node" in warning
        assert "restart 1 of 1 of all ranks from the last checkpoint" in warning
        assert len(run.outcomes()) == 1
        assert newest_checkpoint(run.home) > saved
        _nothing_is_left(cluster, left)


def _grows(run: Run) -> None:
    """Wait until the database has more of each live series than now, of both ranks."""
    live = {("loss", 0), ("throughput", 0), ("rank_imbalance", 0), ("training_memory", 1)}
    live |= {("rank_compute_time", rank) for rank in (0, 1)} | {("cpu_utilization", rank) for rank in (0, 1)}
    wait_for(lambda: live <= run.stored().keys(), 60, lambda: str(run.stored()), pause=0.5)
    before = run.stored()

    def all_grew() -> bool:
        now = run.stored()  # asked once: it takes the processor from the ranks
        return all(now[each] > before[each] for each in live)

    wait_for(all_grew, 60, lambda: f"{before}, {run.stored()}", pause=0.5)
    wait_for(lambda: all((run.progress(name) or 0) > 0 for name in ("done", "rate")), 60, pause=0.2)


def _warnings(run: Run) -> list[str]:
    return [r.message for r in run.records() if isinstance(r, EventRecord) and r.level == "warning"]


def test_a_stalled_rank_is_a_hang_with_the_stacks_of_all_and_a_killed_worker_leaves_no_rank(
    cluster: Cluster, left: Callable[[], str], spec: Path, tmp_path: Path
) -> None:
    """First a point of which a rank stalls, then one whose Ray worker, which supervises it, is killed."""
    changes = ["attention=[nsa, dense]", "steps=100000", "retries=0"]
    deadlines = "deadlines={startup_s: 120, heartbeat_s: 25, point_s: 400}"
    before = set(_folders())
    run = _start(cluster, tmp_path / "home", spec, *changes, deadlines)
    ranks = run.until_trained(cluster)
    folders = set(_folders()) - before
    ranks[0].suspend()
    others = run.until_trained(cluster, point=1)
    assert not any(process.is_running() for process in ranks)
    assert not any(folder.exists() for folder in folders)
    supervisor = point_processes(cluster)[0].parent()
    assert supervisor is not None
    supervisor.kill()
    assert psutil.wait_procs(others, timeout=30)[1] == []
    run.ended(1)
    hang, lost = run.outcomes()
    assert (hang.state, hang.reason) == ("hang", "no progress for 25 s (last in phase 'train')")
    assert (lost.point_id[-1], lost.state) == ("1", "lost")
    stacks = [run.file(f"stacks-rank{number}.txt") for number in (0, 1)]
    assert any('"rank 0"' in text or '"rank 1"' in text for text in stacks)
    assert sorted(process.pid for process in ranks) == sorted(
        int(text.split("pid ")[1].split(":")[0]) for text in stacks
    )
    assert "all_reduce" in "".join(
        r.artifact.content or ""
        for r in run.records()
        if isinstance(r, ArtifactRecord) and "recorder" in r.artifact.name
    )
    waiting = f"pid={ranks[1].pid}"
    stderr = run.file("stderr.txt")
    asked = [line for line in stderr.splitlines() if waiting in line]  # where py-spy may not attach
    assert any(re.search(r'File ".*loop\.py", line \d+ in ', line) for line in asked), "by a signal"
    _nothing_is_left(cluster, left)
