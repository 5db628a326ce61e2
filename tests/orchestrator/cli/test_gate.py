"""`nsa gate`, `nsa plan` and `nsa resolve`, without a cluster."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_up_runs import changed
from nsa_command import Nsa
from quick_driver import MACHINE
from statements import verdicts_of

from orchestrator.cli import submission
from orchestrator.execute.local import LocalExecutor
from orchestrator.run import driver
from orchestrator.settings import Settings
from orchestrator.store import Store
from orchestrator.store.records import MetricData

H200 = "NVIDIA H200"
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


@pytest.fixture
def measured(tmp_path: Path, sweep) -> None:
    """A sweep on an H200 in the commands' database."""
    bound = MetricData(name="oracle_error_bound", unit="1", value=1e-3)
    with Store.open(f"sqlite:///{tmp_path / 'nsa.db'}") as store:
        store.apply_many(changed(sweep(laws={"triton": 1.0, "naive": 2.0}, gpu=H200), metrics=[bound]))


def test_a_plan_needs_no_database(nsa: Nsa, tmp_path: Path):
    code, out, _ = nsa("plan", "linear-scaling/cpu")
    assert code == 0
    assert out.splitlines() == [
        "linear-scaling: Native sparse attention is correct, and its memory grows linearly with S",
        "  Not yet: nothing measured on CPU.",
        "  1. nsa submit jobs/configs/demo.yaml",
        "     no GPU; duration not known",
        "     settles correctness, memory-exponent, naive-contrast, no-failures on CPU",
    ]
    assert not (tmp_path / "nsa.db").exists()


@pytest.mark.usefixtures("measured")
def test_gate_is_go_only_if_each_machine_asked_is(nsa: Nsa):
    code, out, _ = nsa("gate", "linear-scaling")
    assert (code, out.splitlines()[0].split()[0]) == (3, "UNKNOWN")
    assert "  1× A100 80 GB UNKNOWN 17 min, 0.29 GPU-h, $0.52\n" in out
    assert "correctness" not in out
    code, out, _ = nsa("gate", "linear-scaling", "--on", "1x-h200", "--why")
    assert code == 0
    assert "GO      correctness: 0.001 (bound <= 1, margin 0.999): " in out
    code, _, err = nsa("gate", "--on", "9x-h200")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: --on: '9x-h200': no target is judged on it; use one of 1x-a100")


@pytest.mark.usefixtures("measured")
def test_gate_stores_verdicts_by_hardware(nsa: Nsa, tmp_path: Path):
    assert nsa("gate")[0] == 3
    with Store.open(f"sqlite:///{tmp_path / 'nsa.db'}", readonly=True) as store:
        stored = verdicts_of(store).groupby("target")["target_result"].first()
    assert len(stored) == 3 * 6 + 4
    assert stored["linear-scaling/1x-h200"] == "GO"
    assert stored["m7c-125m/1x-h200"] == "UNKNOWN"


def test_resolve_needs_a_cluster_and_a_target(nsa: Nsa):
    code, _, err = nsa("resolve", "linear-scaling", "--dry-run")
    assert code == 2
    assert err.startswith("error: NSA_RAY_DASHBOARD: 'http://127.0.0.1:1': no Ray cluster answers there; start one")
    code, _, err = nsa("resolve", "linear-scaling/tpu")
    assert code == 2
    assert "target: 'linear-scaling/tpu' is unknown; use one of m7c-125m, m7c-125m/1x-a100," in err


def test_resolve_runs_what_the_cluster_can_and_judges(nsa: Nsa, home: Path, monkeypatch: pytest.MonkeyPatch):
    """Its jobs are runs on this machine."""

    def submit(settings: Settings, spec: Path, overrides: Sequence[str]) -> str:
        assert driver.main([str(spec), *submission.set_options(overrides), "--local"]) == 0
        return "raysubmit_1"

    monkeypatch.setattr(LocalExecutor, "probe", lambda self: {None: MACHINE})
    monkeypatch.setattr(submission, "cluster_nodes", lambda settings: [{"CPU": 2.0}])
    monkeypatch.setattr(submission, "submit", submit)
    monkeypatch.setattr(submission, "follow", lambda *_: 0)
    (home / "rules.yaml").write_text(GATES)
    code, out, _ = nsa("resolve", "quick", "--gates", str(home / "rules.yaml"))
    assert code == 3
    assert re.search(r"^failed \(implementations.*triton", out, re.MULTILINE)
    assert re.search(r"^done: nsa submit jobs/configs/demo.yaml", out, re.MULTILINE), "after the wrong one"
    assert "needs a node with 1× H100; this cluster has no GPU" in out
    assert "no command settles soaked on CPU: no job kind yet" in out
    assert re.search(r"^ +CPU +UNKNOWN", out, re.MULTILINE)
    assert "On CPU: open: wrong, soaked." in out  # but not `measured`, which it has settled
