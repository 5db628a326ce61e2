"""`nsa up`, then both ways to submit, then `logs` and `cancel`, as a user types them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import free_ports, wait_for
from ray_clusters import FEW_WORKERS

from orchestrator import provenance
from orchestrator.store import Store, queries

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DRILL = "jobs/configs/drill.yaml"
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a shell in which `nsa up` was run."""
    home = tmp_path_factory.mktemp("nsa")
    ray, dashboard = free_ports(2)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NSA_"))}
    env = clean | {
        "HOME": str(home),  # where the token is written; `make env` lets plain `ray` find it there
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "NSA_HOME": str(home),
        "NSA_RAY_DASHBOARD": f"http://127.0.0.1:{ray}",
        "NSA_DASHBOARD_PORT": str(dashboard),
    }
    up = _run(env | FEW_WORKERS, "nsa", "up", "--num-cpus", "2")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        yield env
    finally:
        assert _run(env, "nsa", "down").returncode == 0


def test_ray_job_submit_needs_no_setting_of_its_own(env: dict[str, str]) -> None:
    command = ["ray", "job", "submit", "--address", env["NSA_RAY_DASHBOARD"], "--working-dir", "."]
    done = _run(env, *command, "--", "python", "-m", "jobs", DRILL, "--set", "behaviours=[ok]")
    assert done.returncode == 0, done.stdout + done.stderr
    run = _last(env)
    assert run["state"] == "done"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert run["git_commit"] == head.stdout.strip()  # of the checkout beside the copy that Ray unpacked


def test_nsa_submit_does_the_same_and_its_log_stays(env: dict[str, str]) -> None:
    done = _run(env, "nsa", "submit", DRILL, "--set", "behaviours=[ok, raise]")
    assert done.returncode == 1, done.stdout + done.stderr  # a point failed, on purpose
    assert "raised on purpose" in done.stdout
    assert re.search(r"^submitted \S+ \(upload: [0-4]\.\d\d MiB\)$", done.stdout, re.MULTILINE)  # sources and spec only
    run = _last(env)
    assert (run["ok"], run["failed"]) == (1, 1)
    state = provenance.git_state()
    assert (run["git_commit"], run["git_branch"]) == (state.commit, state.branch)
    assert provenance.code_hash() in _run(env, "nsa", "show", "last").stdout
    assert "raised on purpose" in _run(env, "nsa", "logs", "last").stdout
    assert "Traceback" in _run(env, "nsa", "logs", "last", "--point", "1").stdout  # the point's own, kept with it


GATES = """
hardware:
  - {name: cpu, title: CPU, gpus: 0}
  - {name: 1x-h100, title: 1× H100, gpu: "*H100*", gpus: 1, architecture: sm90, accelerator: H100}
targets:
  - name: quick
    title: a point is measured
    hardware: [1x-h100, cpu]
    rules:
      - {rule: wrong, title: its spec is wrong, kind: states, where: {job: decode}, measure: {
          spec: demo.yaml, set: ["implementations=[triton]"]}}
      - {rule: measured, title: no point failed, kind: states, where: {job: scaling}, measure: {
          spec: demo.yaml, set: ["lengths=[64]", "implementations=[chunked]", "passes=[forward]", timing.min_s=0]}}
      - {rule: soaked, title: none can, kind: states, where: {job: soak}, measure: no job kind yet}
"""


def test_resolve_runs_what_this_cluster_can_and_judges(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "gates.yaml").write_text(GATES)
    dry = _run(env, "nsa", "resolve", "quick", "--gates", str(tmp_path / "gates.yaml"), "--dry-run")
    assert dry.returncode == 3, dry.stdout + dry.stderr
    assert dry.stdout.count("would run: nsa submit jobs/configs/demo.yaml") == 2
    done = _run(env, "nsa", "resolve", "quick", "--gates", str(tmp_path / "gates.yaml"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert (_last(env)["kind"], _last(env)["ok"]) == ("scaling", 1)  # run after the wrong one
    assert re.search(r"^failed \(implementations.*triton", done.stdout, re.MULTILINE)
    assert "needs a node with 1× H100; this cluster has no GPU" in done.stdout
    assert "no command settles soaked on CPU: no job kind yet" in done.stdout
    assert re.search(r"^ +CPU +UNKNOWN", done.stdout, re.MULTILINE)
    assert "On CPU: open: wrong, soaked." in done.stdout  # but not `measured`, which it has settled


def test_cancel_ends_a_running_job(env: dict[str, str]) -> None:
    before = _last(env)["run_id"]
    done = _run(env, "nsa", "submit", "--no-wait", DRILL, "--set", "behaviours=[timeout, ok]", "--set", "slow_s=60")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: _last(env)["run_id"] != before and _last(env)["running"] > 0, 60, pause=0.5)
    assert "stopping" in _run(env, "nsa", "cancel", "last").stdout
    wait_for(lambda: _last(env)["state"] == "cancelled", 60, pause=0.5)
    assert _last(env)["cancelled"] >= 1


def _run(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False)


def _last(env: dict[str, str]) -> dict:
    with Store.open(f"sqlite:///{env['NSA_HOME']}/nsa.db", readonly=True) as store:
        return queries.runs(store, limit=1).to_dict("records")[0]
