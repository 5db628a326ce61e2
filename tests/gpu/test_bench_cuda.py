"""A bench on a CUDA device: no stage is missing, and their times add up to about the call's."""

import pytest

from jobs.bench import Spec, measure
from jobs.hardware.machine import probe

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
