"""torch.compile on a CUDA device: training with the Triton kernels is one graph that computes what eager mode does."""

from dataclasses import replace

import pytest
import torch

from nsa_core.model import PRESETS, NSATransformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_step_is_the_eager_one(checkpointing):
    shape = {"layers": 1, "vocab_size": 512, "backend": "triton", "checkpointing": checkpointing}
    tokens = torch.randint(512, (2, 1500), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = NSATransformer(replace(PRESETS["m7c_125m"], **shape)).cuda().train()
        call = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, ours in zip(*found, strict=True):
        assert (ours - eager).norm() < 0.05 * eager.norm()
