"""Predicted memory of the Triton kernels, against PyTorch's CPU allocator while the same host code runs.

No kernel runs: allocations follow from shapes alone. tests/gpu compares the predictions with a device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from jobs.measure.memory import measure_peak
from nsa_core import NSAConfig, nsa_attention
from nsa_core.backends import triton_problem
from nsa_core.errors import InputError
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model, predicts
from nsa_core.model import PRESETS, ModelConfig, NSATransformer

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
CPU = torch.device("cpu")
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=64)
MODEL = replace(
    PRESETS["tiny"], dim=128, heads=4, kv_heads=2, head_dim=32, ffn_dim=384, vocab_size=512, nsa=SMALL, backend="triton"
)


@pytest.fixture
def host_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels' host code on the CPU, without launches."""
    from nsa_core.kernels.runtime import launch

    monkeypatch.setattr("nsa_core.backends.triton.unavailable", lambda device, dtype: None)
    with launch.omit():
        yield


def estimate(
    seq_len: int, *, heads: tuple[int, int] = (4, 2), batch: int = 1, backward: bool = True, config: NSAConfig = SMALL,
    dtype: torch.dtype = torch.float32, head_dim: int = 32, device: str = "cpu",
) -> MemoryEstimate:  # fmt: skip
    return estimate_attention(
        config,
        implementation="triton",
        batch=batch,
        seq_len=seq_len,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        backward=backward,
        device=torch.device(device),
    )


def allocated_by_attention(batch: int, seq_len: int, heads: tuple[int, int], dtype: torch.dtype, backward: bool) -> int:
    def tensor(*tail: int) -> Tensor:
        return torch.randn(batch, seq_len, *tail, dtype=dtype, requires_grad=backward)

    q, k, v, gates = tensor(heads[0], 32), tensor(heads[1], 32), tensor(heads[1], 32), tensor(heads[0], 3)
    towards = torch.randn(batch, seq_len, heads[0], 32, dtype=dtype)

    def call() -> object:
        with torch.set_grad_enabled(backward):
            out = nsa_attention(q, k, v, torch.sigmoid(gates), SMALL, backend="triton")
        return out, torch.autograd.grad(out, [q, k, v, gates], towards) if backward else None

    return measure_peak(call, CPU, 0).extra


@needs_triton
@PASSES
@pytest.mark.parametrize(
    ("batch", "seq_len", "heads", "dtype"),
    [
        (1, 7, (4, 2), torch.float32),  # no compressed token
        (1, 64, (4, 2), torch.float32),  # every block is selected
        (1, 600, (6, 1), torch.float32),
        (3, 500, (4, 4), torch.bfloat16),
        (2, 3000, (8, 2), torch.bfloat16),  # slots of several chunks
    ],
)
def test_attention(
    batch: int, seq_len: int, heads: tuple[int, int], dtype: torch.dtype, backward: bool, host_code: None
) -> None:
    predicted = estimate(seq_len, heads=heads, batch=batch, dtype=dtype, backward=backward)
    seen = allocated_by_attention(batch, seq_len, heads, dtype, backward)
    assert predicted.extra == pytest.approx(seen, rel=0.01)


def allocated_by_model(config: ModelConfig, autocast: bool) -> int:
    model = NSATransformer(config).train()
    tokens = torch.randint(config.vocab_size, (2, 600))

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, tokens)
        loss.backward()

    return measure_peak(call, CPU, 0).extra


@needs_triton
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpointing": True, "layers": 4},
        {"vocab_size": 8192, "layers": 1},
        {"nsa": replace(SMALL, compress="mlp")},
    ],
    ids=["plain", "checkpointing", "vocabulary", "learned"],
)
def test_model(changes: dict[str, object], autocast: bool, host_code: None) -> None:
    config = replace(MODEL, **changes)  # type: ignore[arg-type]
    predicted = estimate_model(
        config,
        implementation="triton",
        batch=2,
        seq_len=600,
        dtype=torch.float32,
        backward=True,
        optimizer=None,
        device=CPU,
        autocast=torch.bfloat16 if autocast else None,
    )
    assert predicted.extra == pytest.approx(allocated_by_model(config, autocast), rel=0.1)


@needs_triton
def test_longer_sequences_than_are_traced_continue_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [estimate(2**17, batch=batch) for batch in (1, 3)]
    monkeypatch.setattr("nsa_core.memory.operator._LONGEST", 2**16)  # half of it is beyond the least of any buffer
    for batch, traced in zip((1, 3), whole, strict=True):
        assert estimate(2**17, batch=batch).extra == pytest.approx(traced.extra, rel=0.02)


@needs_triton
@pytest.mark.parametrize(("batch", "seq_len"), [(1, 2**27), (2**20, 2**27), (2**20, 1)])
def test_the_longest_sequences_are_predicted_quickly(batch: int, seq_len: int) -> None:
    start = time.perf_counter()
    assert estimate(seq_len, heads=(12, 2), batch=batch, config=NSAConfig()).extra > 2**30
    assert time.perf_counter() - start < 2


def test_without_triton_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert predicts("chunked")
    monkeypatch.setattr("nsa_core.backends._toolchain.find_spec", lambda name: None)
    monkeypatch.setattr(
        "nsa_core.backends.triton.triton_problem", triton_problem.__wrapped__
    )  # not the one found before
    assert not predicts("triton")
    with pytest.raises(InputError, match=r"^implementation: 'triton': it needs Triton: pip install"):
        estimate(64)
