"""Predicted memory of the Triton backend, against CUDA's caching allocator."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jobs.measure.memory import Peak, measure_peak
from nsa_core import NSAConfig, nsa_attention
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model
from nsa_core.model import PRESETS, NSATransformer

pytestmark = pytest.mark.large
GPU = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps from earlier tests: they count as allocated."""
    torch._C._cuda_clearCublasWorkspaces()


def holds(case: str, predicted: MemoryEstimate, peak: Peak) -> bool:
    """Whether a call's extra memory is predicted within 5 %, its total within 10 %; prints both (-s)."""
    pairs = ((predicted.extra, peak.extra), (predicted.total, peak.allocated))
    found = [f"{said / 2**20:9.1f} for {was / 2**20:9.1f} MiB {100 * (said / was - 1):+5.1f} %" for said, was in pairs]
    print(f"\n{case:40} extra {found[0]}  total {found[1]}")
    return all(abs(said / was - 1) < bound for (said, was), bound in zip(pairs, (0.05, 0.1), strict=True))


@pytest.mark.parametrize(
    "heads", [(12, 2, 64), (32, 8, 128), (64, 4, 128)], ids=lambda heads: "-".join(map(str, heads))
)
@pytest.mark.parametrize(("seq_len", "batch"), [(512, 1), (2048, 16), (8192, 4), (32_768, 1), (65_536, 1)])
def test_attention(heads: tuple[int, int, int], seq_len: int, batch: int) -> None:
    query_heads, kv_heads, dim = heads

    def tensor(*tail: int) -> Tensor:
        return torch.randn(batch, seq_len, *tail, dtype=BF16, device=GPU, requires_grad=True)

    leaves = [tensor(query_heads, dim), tensor(kv_heads, dim), tensor(kv_heads, dim), tensor(query_heads, 3)]
    q, k, v, gates = leaves
    towards = torch.randn_like(q)

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            out = nsa_attention(q, k, v, torch.sigmoid(gates), NSAConfig(), backend="triton")
        return out, torch.autograd.grad(out, leaves, towards) if backward else None

    call(True)
    for backward in (False, True):
        predicted = estimate_attention(
            NSAConfig(),
            implementation="triton",
            batch=batch,
            seq_len=seq_len,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=dim,
            dtype=BF16,
            backward=backward,
            device=GPU,
        )
        if not backward:  # the output's gradient is allocated here all the same
            predicted = replace(predicted, inputs=predicted.inputs + towards.nbytes)
        peak = measure_peak(lambda backward=backward: call(backward), GPU, 0)
        case = f"{query_heads}/{kv_heads} d{dim} {batch}x{seq_len} {'forward+backward' if backward else 'forward'}"
        assert holds(case, predicted, peak)


@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "plain"])
def test_training_step(checkpointing: bool, batch: int) -> None:
    """The 125M model with bf16 autocast, clipped gradients and fused AdamW, after two steps that make its state."""
    config = replace(PRESETS["m7c_125m"], backend="triton", checkpointing=checkpointing)
    model = NSATransformer(config).to(GPU).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens, targets = torch.randint(config.vocab_size, (2, batch, 2048), device=GPU)

    def step() -> None:
        with torch.autocast("cuda", BF16):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    predicted = estimate_model(
        config,
        implementation="triton",
        batch=batch,
        seq_len=2048,
        dtype=torch.float32,
        backward=True,
        optimizer="adamw",
        device=GPU,
        autocast=BF16,
    )
    assert holds(f"125M {batch}x2048 {'checkpointing' if checkpointing else ''}", predicted, measure_peak(step, GPU, 0))
