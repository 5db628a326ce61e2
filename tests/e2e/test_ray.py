"""A real Ray cluster and real `ray job submit`: isolation, GPUs, lost workers, stopped jobs, resumed runs."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from homes import journal_of, records, stored
from nsa_command import nsa
from processes import wait_for
from ray_clusters import Cluster, asked_for, point_processes

from orchestrator.provenance import user
from orchestrator.store import Store, StoreError, journal, queries
from orchestrator.store.records import ArtifactRecord, EventRecord, OutcomeRecord, StartRecord

ROOT = Path(__file__).resolve().parents[2]
DRILL = "jobs/configs/drill.yaml"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def submit(cluster: Cluster, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `ray job submit --working-dir . -- python -m jobs ...` to its end."""
    return subprocess.run(
        _submit(cluster, home, *args), cwd=ROOT, env=cluster.env(home), capture_output=True, text=True
    )


def _submit(cluster: Cluster, home: Path, *args: str, options: tuple[str, ...] = ()) -> list[str]:
    runtime_env = json.dumps({"env_vars": {"NSA_HOME": str(home), "NSA_GIT_COMMIT": "c0ffee"}})
    command = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", ".", *options]
    return [*command, "--runtime-env-json", runtime_env, "--", "python", "-m", "jobs", *args]


def settings(behaviours: str, *more: str) -> list[str]:
    changes = [f"behaviours={behaviours}", "deadlines={startup_s: 60, heartbeat_s: 6, point_s: 60}", *more]
    return [item for change in changes for item in ("--set", change)]


def outcomes(home: Path) -> list[OutcomeRecord]:
    return [record for record in records(home) if isinstance(record, OutcomeRecord)]


def test_a_submitted_sweep_survives_every_failure(cluster: Cluster, home: Path) -> None:
    typo = _submit(cluster, home, DRILL, "--set", "lenghts=[1]")  # beside the sweep, which it must not disturb
    refused = subprocess.Popen(typo, cwd=ROOT, env=cluster.env(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    each = "resources={workers: 2, num_gpus: 1, num_cpus: 1}"
    done = submit(cluster, home, DRILL, *settings("[ok, crash, hang, oom, raise, skip, ok]", each))
    log = refused.communicate(timeout=60)[0].decode()
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False) as store:
        [failed] = queries.runs(store, state="failed").to_dict("records")
    assert "lenghts" in failed["reason"]
    assert failed["submission_id"] in log
    assert "exit code 1" in done.stdout + done.stderr, done.stdout + done.stderr
    row, points = stored(home)
    ends = ["ok", "crash", "hang", "oom", "error", "skipped", "ok"]
    assert (row["state"], list(points["state"])) == ("done", ends)
    assert [bool(reason) for reason in points["reason"]] == [state != "ok" for state in ends]
    for state, count in Counter(ends).items():
        assert re.search(rf"^{state} +{count} *$", done.stdout, re.MULTILINE), done.stdout
    assert row["git_commit"] == "c0ffee"
    assert row["submission_id"] in done.stdout
    assert f"journal and artifacts: {home}" in done.stdout
    assert all("torch" in outcome.environment["packages"] for outcome in outcomes(home)), "of points that failed, too"
    variables = [outcome.environment["variables"] for outcome in outcomes(home)]
    assert {v["CUDA_VISIBLE_DEVICES"] for v in variables} == {"0", "1"}, "beside the one that hangs"
    assert {v["OMP_NUM_THREADS"] for v in variables} == {"1"}
    [hang] = [outcome for outcome in outcomes(home) if outcome.state == "hang"]
    files = [r.artifact for r in records(home) if isinstance(r, ArtifactRecord) and r.point_id == hang.point_id]
    [stacks] = [file for file in files if file.name == "stacks.txt"]
    assert "measure (jobs/drill.py" in str(stacks.content)
    assert (home / "artifacts" / stacks.path).read_text() == stacks.content
    assert stacks.path.startswith(f"{journal_of(home).parent.name}/0002/1/")
    assert point_processes(cluster) == []


def test_a_lost_worker_costs_the_probe_nothing_and_a_point_one_attempt_and_a_killed_driver_leaves_no_process(
    cluster: Cluster, home: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "python"  # else the probe, before which there is no journal, may end before it is seen
    slow.write_text(f'#!/bin/sh\n[ -e {home}/artifacts ] || sleep 2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    alone = [
        "deadlines.point_s=600",
        "retries=1",
        "resources.workers=1",
        f"python={slow}",
    ]  # else either may be seen first
    command = [sys.executable, "-m", "jobs", DRILL, *settings("[timeout, ok]", *alone)]
    driver = subprocess.Popen(command, cwd=ROOT, env=cluster.env(home), stdout=subprocess.DEVNULL)
    wait_for(lambda: bool(point_processes(cluster)), 120)
    assert not (home / "artifacts").exists()  # no point yet: it is the probe's
    _kill_supervisor(point_processes(cluster)[0])
    child = _measuring(cluster, home)
    _kill_supervisor(child)
    again = _measuring(cluster, home, attempt=2)
    assert not child.is_running()
    assert [(o.point_id[-1], o.attempt, o.state) for o in outcomes(home)] == [("0", 1, "lost"), ("1", 1, "ok")]
    assert "attempt 1 got lost" in "".join(each.message for each in records(home) if isinstance(each, EventRecord))
    driver.kill()
    driver.wait()
    assert psutil.wait_procs([again], timeout=60)[1] == []  # Ray ends the task of a driver that is gone


def _kill_supervisor(process: psutil.Process) -> None:
    """Kill the Ray worker that started a process."""
    worker = process.parent()
    assert worker is not None
    worker.kill()


def test_a_driver_is_stopped_while_ray_connects(cluster: Cluster, home: Path) -> None:
    """Late: Ray has by then put a handler of its own, which aborts the process, for SIGTERM."""
    hang = "ray._private.worker._post_init_hooks.append(lambda: (print('connecting', flush=True), time.sleep(600)))"
    code = f"import runpy, time, ray; {hang}; runpy.run_module('jobs', run_name='__main__')"
    command = [sys.executable, "-c", code, DRILL, *settings("[ok]")]
    pipe = subprocess.PIPE
    env = cluster.env(home) | {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "raysubmit_1"}}'}
    driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "connecting\n"
    time.sleep(0.3)
    driver.terminate()
    out, err = driver.communicate(timeout=90)
    assert (driver.returncode, out, err) == (130, "", "")
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False) as store:
        assert list(queries.runs(store)["state"]) == ["cancelled"]


def _measuring(cluster: Cluster, home: Path, attempt: int = 1) -> psutil.Process:
    """Child process of the first point, in this attempt."""

    def started() -> bool:
        paths = list((home / "artifacts").glob(f"*/{journal.NAME}"))
        kept = list(journal.read(paths[0])) if paths else []
        latest = [record for record in kept if isinstance(record, (StartRecord, OutcomeRecord))][-1:]
        begun = [r for r in latest if r.type == "start" and (r.point_id[-1], r.attempt) == ("0", attempt)]
        return bool(begun and point_processes(cluster))

    wait_for(started, 90, pause=0.2)
    time.sleep(1)
    return point_processes(cluster)[0]


def test_a_job_that_waits_for_room_is_listed_and_can_be_cancelled_and_a_stopped_one_leaves_no_process(
    cluster: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of the first is stopped by Ray while it asks the cluster, whose cores the second has."""
    env = cluster.env(home) | {"NSA_RAY_DASHBOARD": cluster.dashboard}
    url, busy = f"sqlite:///{home / 'nsa.db'}", home / "busy"

    def start(job: str, where: Path, *settings: str) -> None:
        options = ("--no-wait", "--submission-id", job)
        subprocess.run(_submit(cluster, where, DRILL, *settings, options=options), cwd=ROOT, env=env, check=True)

    start("busy", busy, *settings("[timeout, timeout, ok]", "deadlines.point_s=600", "resources.workers=2"))
    try:
        wait_for(lambda: len(_states(f"sqlite:///{busy / 'nsa.db'}", "running")) == 1, 60, pause=0.5)
        start("waits", home)
        wait_for(lambda: len(_states(url, "pending")) == 1, 60, pause=0.5)
        [waiting] = _states(url, "pending")
        for name in ("NSA_HOME", "NSA_RAY_DASHBOARD"):
            monkeypatch.setenv(name, env[name])
        asked = nsa("cancel", waiting)
        assert f"stopping {waiting} (job waits)" in asked.out, asked
        wait_for(lambda: _states(url, "cancelled") == [waiting], 30, pause=0.5)
        with Store.open(url) as store:
            assert queries.reasons(store, [waiting]) == {waiting: f"cancelled by {user()} with nsa cancel"}
        wait_for(lambda: len(point_processes(cluster)) == 2, 60, pause=0.2)
        measuring = point_processes(cluster)
    finally:
        asked_for(cluster, "/api/jobs/busy/stop", "POST")
    assert psutil.wait_procs(measuring, timeout=60)[1] == []
    row, points = stored(busy)
    assert row["state"] == "cancelled"
    assert list(points["state"]) == ["cancelled"] * 3
    assert records(busy)[-1].type == "run_end"


def _states(url: str, state: str) -> list[str]:
    """The ids of the runs in a state; none if there is no database yet."""
    try:
        with Store.open(url, create=False, readonly=True) as store:
            return list(queries.runs(store, state=state)["run_id"])
    except StoreError:
        return []


def test_a_job_that_holds_the_cores_of_its_points_is_refused(cluster: Cluster, home: Path) -> None:
    options = ("--entrypoint-num-cpus", "1")
    command = _submit(cluster, home, DRILL, *settings("[ok]", "resources.num_cpus=2"), options=options)
    done = subprocess.run(command, cwd=ROOT, env=cluster.env(home), capture_output=True, text=True, timeout=200)
    assert "entrypoint: this job itself holds 1 CPU" in done.stdout
