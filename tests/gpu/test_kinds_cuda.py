"""Kinds of jobs on CUDA devices: stages add up, replays are timed, two GPUs train as one, variables have effect."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from travelling import travelled

from jobs import decode
from jobs import train as training
from jobs.bench import Spec, measure
from jobs.hardware.machine import probe
from jobs.profile import times_ms
from jobs.schema.point import Machine
from jobs.specs.spec import Deadlines
from nsa_core import NSAConfig, nsa_attention
from nsa_core.kernels.runtime.launch import observe

STAGES = {"compress", "scores", "topk", "inverse_index", "selected", "merge", "other"}
BACKWARD = {"compress_backward", "compressed_backward_kv", "window_forced_backward_kv", "selected_backward"}


def values(point):
    result = measure(point.case, lambda phase, done=0, total=0: None)
    return {metric.name: metric.value for metric in result.metrics}, result.files


def test_stages_are_complete_and_add_up_to_the_call():
    data = {
        "kind": "bench",
        "name": "t",
        "implementations": ["triton"],
        "shapes": [{"query_heads": 12, "kv_heads": 2, "head_dim": 64}],
        "lengths": [8192],
        "passes": ["forward+backward"],
    }
    timed, staged = Spec.model_validate(data).points(probe("cuda"))
    shares = []
    for _ in range(8):  # other tests may share the GPU
        call, _ = values(timed)
        found, files = values(staged)
        stages = {name.removeprefix("stage_"): ms for name, ms in found.items() if name.startswith("stage_")}
        assert stages.keys() >= STAGES | BACKWARD
        assert all(ms > 0 for ms in stages.values())
        assert "_selected_forward" in files["kernels.txt"]
        shares.append(sum(stages.values()) / call["time"])
        if 0.85 < shares[-1] < 1.15:
            return
    pytest.fail(f"the stages' times are not the call's: {shares}")


def test_the_ranges_of_stages_have_the_time_of_their_kernels():
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(1, 4096, heads, 64, **options) for heads in (12, 2, 2))
    gates = torch.rand(1, 4096, 12, 3, **options)

    def call():
        out = nsa_attention(q, k, v, gates, NSAConfig(), backend="triton")
        torch.autograd.grad(out.sum(), [q, k, v, gates])

    with observe() as made:
        call()
    stages = {one.stage for one in made}
    for _ in range(3):
        call()  # captured, then replayed
    for _ in range(2):  # a process's first profile may miss kernels
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as watch:
            call()
            torch.cuda.synchronize()
    busy, ranges = times_ms(watch.key_averages(), cuda=True)
    assert ranges.keys() == stages | {"cmp_slc_win"}
    assert min(ranges.values()) > 0
    forward = {name for name in stages if "backward" not in name}
    assert sum(ranges[name] for name in forward) <= 1.001 * ranges["cmp_slc_win"]
    assert 0.5 * busy < sum(ranges[name] for name in stages) <= 1.001 * busy  # the rest: PyTorch's own kernels


@pytest.mark.parametrize("workload", ["attention", "model"])
@pytest.mark.parametrize("implementation", ["triton", "dense"])
def test_replays_are_timed(implementation, workload):
    spec = decode.Spec.model_validate(
        {
            "kind": "decode",
            "name": "t",
            "workload": workload,
            "implementations": [implementation],
            "lengths": [2000],
            "batch": 2,
            "layers": 2,
            "dtype": "bfloat16",
            "preset": "m7c_125m",
            "timing": {"repeats": 20, "min_s": 0, "max_s": 2, "warmup": 3},
        }
    )
    point = spec.points(Machine("cuda", torch.cuda.get_device_name(), 2**36))[0]
    result = decode.measure(point.case, lambda *_: None)
    assert set(result.route.values()) == {"decode-triton"}
    found = {metric.name: metric for metric in result.metrics}
    assert "replays of a CUDA graph" in found["time"].method
    assert found["time"].value > 0
    assert 0 <= found["rows_error"].value <= found["rows_error_bound"].value


def train(**changes):
    """Metrics of a short training, by name."""
    sizes = {"seq_len": 256, "batch": 4, "steps": 8, "optimizer": {"warmup_steps": 2}}
    sizes |= {"device": "cuda", "precision": "float32"}
    spec = training.Spec.model_validate({"kind": "train", "name": "ranks", "preset": "tiny", **sizes, **changes})
    (point,) = spec.points(Machine("cuda", "card", 2**36))
    return {metric.name: metric for metric in training.measure(travelled(point), lambda *_: None).metrics}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-4),
        ({"gradient_compression": "bf16"}, 1e-2),
        ({"parallel": "replicate"}, 1e-4),
        ({"parallel": "replicate", "compile": True, "cuda_graphs": True}, 1e-4),
    ],
    ids=["averaged by NCCL", "compressed", "in place", "in place, compiled"],
)
def test_two_gpus_train_as_one_does(changes, tolerance):
    one, two = train(), train(ranks=2, **changes)
    assert two["loss"].samples == pytest.approx(one["loss"].samples, rel=tolerance)
    assert two["heldout_loss"].value == pytest.approx(one["heldout_loss"].value, rel=tolerance)


ROOT = Path(__file__).resolve().parents[2]
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def run(folder: Path, *envs: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The driver's end and the outcomes of one trivial point on the GPU under each environment."""
    spec = folder / "spec.yaml"
    content = {"kind": "drill", "name": "t", "behaviours": ["ok"], "device": "cuda", "env": list(envs)}
    spec.write_text(json.dumps(content | {"deadlines": Deadlines(startup_s=120).model_dump()}))
    inherited = {name: value for name, value in os.environ.items() if name not in (ALLOCATOR, "PYTORCH_ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-m", "jobs", str(spec), "--local"],
        cwd=ROOT,
        env=inherited | {"NSA_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
    )
    lines = [line for file in folder.glob("home/artifacts/*/journal.jsonl") for line in file.read_text().splitlines()]
    return done, [record for record in map(json.loads, lines) if record["type"] == "outcome"]


def test_three_allocator_settings_have_three_effective_values(tmp_path: Path) -> None:
    segments, split = {ALLOCATOR: "expandable_segments:True"}, {ALLOCATOR: "max_split_size_mb:128"}
    done, outcomes = run(tmp_path, {}, segments, split)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, expandable, limited = (outcome["environment"]["settings"][ALLOCATOR] for outcome in outcomes)
    assert "expandable_segments=False" in plain
    assert "expandable_segments=True" in expandable
    assert f"max_split_size={128 * 2**20}" in limited
    assert len({plain, expandable, limited}) == 3


def test_blocking_launches_are_seen_by_their_duration(tmp_path: Path) -> None:
    done, outcomes = run(tmp_path, {}, {"CUDA_LAUNCH_BLOCKING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    effective = [outcome["environment"]["settings"]["CUDA_LAUNCH_BLOCKING"] for outcome in outcomes]
    assert effective == ["asynchronous", "blocking"]


def test_settings_without_effect_are_refused_by_name(tmp_path: Path) -> None:
    ineffective = {
        ALLOCATOR: "expandable_segments:False",
        "CUDA_LAUNCH_BLOCKING": "0",
        "NCCL_DEBUG": "INFO",
    }
    done, outcomes = run(tmp_path, ineffective)
    assert (done.returncode, outcomes) == (2, [])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in lines] == [f"env.{name}" for name in ineffective]
    for line, reason in zip(lines, ("is in effect as well", "is in effect", "one GPU"), strict=True):
        assert reason in line
    assert "Traceback" not in done.stderr


def test_a_value_that_the_allocator_rejects_is_refused(tmp_path: Path) -> None:
    done, outcomes = run(tmp_path, {ALLOCATOR: "no_such_option:1"})
    assert (done.returncode, outcomes) == (2, []), done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: env.{ALLOCATOR}: 'no_such_option:1': ")
