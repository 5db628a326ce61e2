"""Training on two GPUs, each a rank of NCCL."""

import pytest
import torch
from travelling import travelled

from jobs.schema.point import Machine
from jobs.train import Spec, measure

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def train(**changes):
    """Metrics of a short training, by name."""
    sizes = {"seq_len": 256, "batch": 4, "steps": 8, "optimizer": {"warmup_steps": 2}}
    sizes |= {"device": "cuda", "precision": "float32"}
    spec = Spec.model_validate({"kind": "train", "name": "ranks", "preset": "tiny", **sizes, **changes})
    (point,) = spec.points(Machine("cuda", "card", 2**36))
    return {metric.name: metric for metric in measure(travelled(point), lambda *_: None).metrics}


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
