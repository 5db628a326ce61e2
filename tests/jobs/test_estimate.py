"""The estimate kind: parts of a pass's peak memory, as predicted and as allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from travelling import CPU, travelled, values_of

from jobs.estimate import Spec, measure, measure_parts
from jobs.measure.passes import ModelPass
from jobs.specs.load import parse_spec
from jobs.specs.spec import SpecError

MIB = 2**20


def _spec(**changes: Any) -> Spec:
    data: dict[str, Any] = {"kind": "estimate", "name": "t", "preset": "tiny", "implementations": ["chunked"]}
    return Spec.model_validate(data | {"lengths": [64]} | changes)


def test_parts_of_a_known_pass() -> None:
    """One product y = x w, x [256,1024], w [1024,512], float32: the gradient is w's, the output is an activation."""
    x, w, cpu = torch.ones(256, 1024), torch.ones(1024, 512, requires_grad=True), torch.device("cpu")
    parts = measure_parts(lambda: x @ w, lambda y: y.backward(torch.ones(256, 512)), [w], cpu)
    assert parts["gradients"] == 2 * MIB
    assert parts["activations"] == pytest.approx(MIB / 2, abs=1024)
    assert parts["workspace"] == pytest.approx(MIB / 2, abs=1024)  # the output's gradient


@pytest.mark.parametrize(
    ("implementation", "changes"),
    [
        ("chunked", {"passes": ["train"]}),
        ("dense", {"passes": ["train"]}),
        ("naive", {"passes": ["forward+backward"], "checkpointing": True}),
    ],
)
def test_predicted_and_allocated_parts_agree(implementation: str, changes: dict[str, Any]) -> None:
    (point,) = _spec(implementations=[implementation], lengths=[512], **changes).points(CPU)
    result = measure(travelled(point), lambda *_: None)
    found = values_of(result)
    assert abs(found["estimate_error"]) < 10
    for part in ("parameters", "optimizer", "inputs"):
        assert found[f"predicted_{part}"] == pytest.approx(found[f"allocated_{part}"], rel=0.01)
    extra = sum(found[f"allocated_{part}"] for part in ("gradients", "activations", "workspace"))
    assert extra == pytest.approx(found["peak_extra_memory"], rel=0.02)  # two ways of measuring one peak
    assert found["predicted_activations"] == pytest.approx(found["allocated_activations"], rel=0.1, abs=1e-3)
    assert found["predicted_workspace"] == pytest.approx(found["allocated_workspace"], rel=0.15)


def test_the_optimizers_state_counts_on_a_device_without_an_index() -> None:
    """As on a GPU, a tensor's device is not equal to the one that it was put on: "cpu:0" gives "cpu"."""
    (point,) = _spec(passes=["train"]).points(CPU)
    trial = ModelPass(point.case.model_copy(update={"device": "cpu:0"}))
    trial.run()
    moments = sum(x.numel() for x in trial.state if x.dim())
    assert moments == 2 * sum(p.numel() for p in trial.parameters)


def test_checkpointing_that_no_pass_uses_is_refused() -> None:
    data = {"kind": "profile", "name": "t", "preset": "tiny", "implementations": ["chunked"], "lengths": [64]}
    with pytest.raises(SpecError, match=r"^checkpointing: True: changes nothing of a forward pass; leave it out"):
        parse_spec(data | {"checkpointing": True, "passes": ["forward"]})
