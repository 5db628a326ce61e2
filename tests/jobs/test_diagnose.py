"""The kind diagnose: memory by phase, the ranks' states, topology, the advice; and preflight: a point a card."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from trainings import Keeping
from travelling import CPU, travelled, values_of

from jobs import diagnose, preflight
from jobs.diagnosis.advice import Advice, Diagnosis, advise, describe
from jobs.diagnosis.rank_state import Memory, RankState, identity
from jobs.hardware import health
from jobs.hardware import topology as module
from jobs.hardware.machine import probe
from jobs.hardware.topology import Gpu, Topology, topology
from jobs.schema.point import SHORT
from orchestrator.cli.commands import main
from orchestrator.execute.local import LocalExecutor
from orchestrator.run import driver


def test_a_diagnosis_has_the_memory_of_each_phase_and_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 400)
    data = {"kind": "diagnose", "name": "t", "seq_len": 48, "batch": 2, "steps": 5, "optimizer": {"warmup_steps": 2}}
    spec = diagnose.Spec.model_validate(data | {"data": {"path": str(tmp_path), "heldout_batches": 1}})
    (point,) = spec.points(CPU)
    report = Keeping()
    result = diagnose.measure(travelled(point), report)
    values = values_of(result)
    sizes = [values[f"{phase}_resident"] for phase in ("boot", "loader", "step_1", "now")]
    assert sizes[0] > 50
    assert sizes[2] >= sizes[0]
    assert report.warnings[0].startswith("CUDA_LAUNCH_BLOCKING=1")
    lines = str(result.files["diagnosis.md"]).partition("## Memory")[0].splitlines()
    assert [line[2:] for line in lines if line.startswith("- ")] == report.warnings
    assert values["warnings"] == len(report.warnings)
    assert values["throughput"] > 0
    (host,) = result.environment["hosts"]
    assert set(host) == {"cores", "numa", "gpus", "links"}  # nothing that names the host
    assert "cmp: chunked" in str(result.files["diagnosis.md"])
    state = RankState.from_json(report.kept["rank0.json"])
    assert state is not None
    assert (state.rank, state.step, state.pid, state.process) == (0, 1, os.getpid(), identity(os.getpid()))
    assert set(state.memory) == {"boot", "loader", "step_1"}
    assert dict(state.route) == dict(result.route)


def test_a_state_fits_into_one_write_and_a_torn_one_is_none() -> None:
    state = _rank(0, host="h" * 64, cores="0-127,256-383", route=dict.fromkeys(("cmp", "slc", "win"), "k" * 40))
    full = replace(state, memory=dict.fromkeys(("boot", "loader", "step_1", "now"), Memory(1e6, 1e6, 1e6)))
    text = json.dumps(asdict(full), separators=(",", ":"))
    assert len(text) < SHORT
    assert RankState.from_json(text) == full
    assert RankState.from_json(text[:-1]) is None
    assert RankState.from_json('{"rank": 0}') is None
    assert RankState.from_json("[]") is None


def _rank(rank: int, **changes: Any) -> RankState:
    gpu = {"device": "cuda", "gpu": f"GPU-{rank}", "cores": "0-3", "threads": 2}
    place = {"ranks": 2, "step": 9, "host": "a", "pid": 10 + rank, "process": f"p{rank}"}
    known: dict[str, Any] = {"route": {"cmp": "triton"}, "versions": {"torch": "2.13.0"}}
    return RankState(**{"rank": rank, **place, **gpu, **known, **changes})


def _gpu(number: int, **changes: Any) -> Gpu:
    return replace(Gpu(str(number), "H", f"GPU-{number}", 0, 80_000, 20_000, 99, processes=(1,)), **changes)


def _host(**changes: Any) -> Topology:
    found = Topology("a", "cpu", "0-7", {0: "0-3", 1: "4-7"}, 60_000, "580", (_gpu(0), _gpu(1)))
    return replace(found, **{"links": {("GPU-0", "GPU-1"): "NVLink"}, **changes})


SOUND = Diagnosis([_rank(0), _rank(1)], [_host()], {}, {0: 95.0, 1: 93.0}, 2.0)


def test_a_sound_training_gets_no_warning() -> None:
    assert advise(SOUND) == []
    assert "## Warnings\n\nnone" in describe(SOUND, [])


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "waits for every kernel", "unset"),
        ({"hosts": [_host(links={("GPU-0", "GPU-1"): "PHB"})]}, "joined by PHB", "NVLink"),
        ({"ranks": [_rank(0, cores="4-7"), _rank(1)]}, "GPU is on NUMA node 0", "numactl --cpunodebind=0"),
        ({"ranks": [_rank(0, device="cpu", gpu="", cores="0", threads=4)]}, "4 threads of 1 ranks", "num_cpus: 1"),
        ({"ranks": [_rank(0, versions={"torch": "2.5.1"})]}, "PyTorch 2.5.1 is untested", "install"),
        ({"ranks": [_rank(0, versions={"triton": "3.1.0"})]}, "Triton 3.1.0 is untested", "pip install"),
        ({"ranks": [_rank(0), _rank(1, versions={"torch": "2.12.0"})]}, "different versions", "every node"),
        ({"ranks": [_rank(0, route={"cmp": "chunked"})]}, "on a GPU chunked runs", "triton"),
        ({"ranks": [_rank(0), _rank(1, route={"cmp": "flash"})]}, "different kernels", "one type of card"),
        ({"ranks": [_rank(0, memory={"now": Memory(1, 1_300, 57_900)})]}, "57,900 MiB for", "expandable_segments"),
        ({"hosts": [_host(gpus=(_gpu(0, used_mib=79_000), _gpu(1)))]}, "is full", "micro_batch"),
        ({"hosts": [_host(gpus=(_gpu(0, throttled=True), _gpu(1)))]}, "throttled", "nvidia-smi"),
        ({"hosts": [_host(gpus=(_gpu(0, processes=(1, 2)), _gpu(1)))]}, "has 2 processes", "end those"),
        ({"hosts": [_host(memory_mib=500)]}, "only 500 MiB", "end other processes"),
        ({"utilization": {0: 100.0, 1: 17.0}}, "rank 1 is busy 17 %", "micro_batch"),
        ({"imbalance": 31.0}, "31 % longer", "throttled GPU"),
    ],
)
def test_each_trouble_has_its_warning_with_a_fix(changes: dict[str, Any], what: str, fix: str) -> None:
    (found,) = advise(replace(SOUND, **changes))
    assert what in found.what
    assert fix in found.fix


def test_links_and_nodes_are_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text("1\n")
    monkeypatch.setattr(module, "_PCI", tmp_path)
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda gpu: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=2**30, used=2**29),
        "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{'3B' if gpu else '5C'}:00.0"),
        "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=50),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x20 * gpu,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=7)],
        "nvmlDeviceGetP2PStatus": lambda a, b, index: 0 if {a, b} == {0, 1} else 1,
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 30,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    found = topology(["0", "1", "2"])
    assert [gpu.numa for gpu in found.gpus] == [None, 1, 1]
    assert [gpu.throttled for gpu in found.gpus] == [False, True, True]
    assert found.links == {("GPU-0", "GPU-1"): "NVLink", ("GPU-0", "GPU-2"): "PHB", ("GPU-1", "GPU-2"): "PHB"}
    assert found.gpus[0].used_mib == 512
    placed = found.placement()
    assert placed["links"] == {"0 to 1": "NVLink", "0 to 2": "PHB", "1 to 2": "PHB"}
    assert placed["gpus"] == {"0": None, "1": 1, "2": 1}
    shown = describe(Diagnosis(hosts=[found]), [Advice("a", "b")])
    assert "GPU 0 to GPU 2: PHB" in shown
    assert "- a; b" in shown


def test_a_card_is_a_point_and_rates_are_amounts_a_second() -> None:
    spec = preflight.Spec(kind="preflight", name="t", cards=2, size=256, copy_mib=1, load_s=0.01)
    points = spec.points(CPU)
    assert [point.axes.more for point in points] == [{"card": 0}, {"card": 1}]
    result = preflight.measure(travelled(points[0]), lambda *_: None)
    assert values_of(result).keys() == {"gemm_rate", "copy_rate"}
    assert all(value > 0 for value in values_of(result).values())


@pytest.mark.parametrize(("code", "log"), [(1, None), (0, "[1] NVRM: Xid (PCI:0000:3b:00): 79, fell off\n")])
def test_the_kernels_log_that_may_not_be_read_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, log: str | None
) -> None:
    monkeypatch.setattr(health.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code, stdout=log))
    monkeypatch.setattr(health, "_KERNEL_LOG", tmp_path / "none")
    assert health._kernel_log() == log
    assert log is None or health.xids(log, "00000000:3B:00.0") == [79]


def test_on_a_cpu_all_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: dict.fromkeys(self._spec.python, probe("cpu")))
    assert driver.main(["jobs/configs/preflight.yaml", "--local", "--set=load_s=0.1", "--set=size=64"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["nsa", "fleet"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().out
    assert ended.value.code == 3
    assert "UNKNOWN" in said
    assert "the point ran on the CPU: nothing of a card was measured" in said
    assert not {"BAD", "WARN", "OK"} & set(said.split())
