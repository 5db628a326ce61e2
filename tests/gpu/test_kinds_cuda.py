"""Kinds of jobs on CUDA devices: stages and ranges add up, replays are timed, two GPUs train as one."""

import pytest
import torch
from travelling import travelled

from jobs import decode
from jobs import train as training
from jobs.bench import Spec, measure
from jobs.hardware.machine import probe
from jobs.profile import profile_call
from jobs.schema.point import Machine
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
    device = torch.device("cuda")
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
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
    profile_call(call, device)  # a process's first profile may miss kernels
    found = profile_call(call, device)
    assert found.ranges_ms.keys() == stages | {"cmp_slc_win"}
    assert min(found.ranges_ms.values()) > 0
    forward = {name for name in stages if "backward" not in name}
    assert sum(found.ranges_ms[name] for name in forward) <= 1.001 * found.ranges_ms["cmp_slc_win"]
    of_stages = sum(found.ranges_ms[name] for name in stages)
    assert 0.5 * found.busy_ms < of_stages <= 1.001 * found.busy_ms  # the rest: PyTorch's own kernels


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
