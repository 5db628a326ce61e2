"""The decode kind on a CUDA device: it times replays of a graph of the kernels."""

import pytest
import torch


@pytest.mark.parametrize("workload", ["attention", "model"])
@pytest.mark.parametrize("implementation", ["triton", "dense"])
def test_replays_are_timed(implementation, workload):
    from jobs.decode import Spec, measure
    from jobs.schema.point import Machine

    spec = Spec.model_validate(
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
    result = measure(point.case, lambda *_: None)
    assert set(result.route.values()) == {"decode-triton"}
    found = {metric.name: metric for metric in result.metrics}
    assert "replays of a CUDA graph" in found["time"].method
    assert found["time"].value > 0
    assert 0 <= found["rows_error"].value <= found["rows_error_bound"].value
