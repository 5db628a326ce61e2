"""Predicted memory against the allocator's own count: within 10 % at every length, for every benchmarked path."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jobs.measure.memory import measure_peak
from nsa_core import NSAConfig, dense_attention, nsa_attention
from nsa_core.backends import chunks
from nsa_core.errors import InputError
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model
from nsa_core.memory.operator import _trace
from nsa_core.model import PRESETS, ModelConfig, NSATransformer

CPU = torch.device("cpu")
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=64)
MODEL = replace(PRESETS["tiny"], dim=128, heads=4, kv_heads=2, head_dim=32, ffn_dim=384, vocab_size=512, nsa=SMALL)
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])


def peak_of_attention(implementation: str, batch: int, seq_len: int, heads: int, kv_heads: int, backward: bool) -> int:
    def tensor(*tail: int) -> Tensor:
        return torch.randn(batch, seq_len, *tail, requires_grad=backward)

    q, k, v, gates = tensor(heads, 32), tensor(kv_heads, 32), tensor(kv_heads, 32), tensor(heads, 3)
    inputs = [q, k, v] if implementation == "dense" else [q, k, v, gates]
    towards = torch.randn(batch, seq_len, heads, 32)

    def call() -> object:
        with torch.set_grad_enabled(backward):
            if implementation == "dense":
                out = dense_attention(q, k, v)
            else:
                out = nsa_attention(q, k, v, torch.sigmoid(gates), SMALL, backend=implementation)
        return out, torch.autograd.grad(out, inputs, towards) if backward else None

    return measure_peak(call, CPU, 0).extra


def peak_of_model(config: ModelConfig, batch: int, seq_len: int, backward: bool) -> int:
    model = NSATransformer(config)
    tokens, parameters = torch.randint(config.vocab_size, (batch, seq_len)), list(model.parameters())

    def call() -> object:
        with torch.set_grad_enabled(backward):
            loss = model(tokens, tokens)
        return loss, torch.autograd.grad(loss, parameters) if backward else None

    return measure_peak(call, CPU, 0).extra


def estimate(
    implementation: str, batch: int, seq_len: int, heads: int, kv_heads: int, backward: bool
) -> MemoryEstimate:
    return estimate_attention(
        SMALL,
        implementation=implementation,
        batch=batch,
        seq_len=seq_len,
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        dtype=torch.float32,
        backward=backward,
        device=CPU,
    )


def estimate_of(config: ModelConfig, implementation: str, batch: int, seq_len: int, backward: bool, **more: object):
    common = {"dtype": torch.float32, "optimizer": None, "device": CPU} | more
    return estimate_model(
        config, implementation=implementation, batch=batch, seq_len=seq_len, backward=backward, **common
    )


@PASSES
@pytest.mark.parametrize(
    ("implementation", "seq_len"),
    [
        *(("chunked", seq_len) for seq_len in (50, 128, 300, 800)),
        *(("naive", seq_len) for seq_len in (64, 128, 300, 512)),
        *(("reference", seq_len) for seq_len in (128, 300)),
        *(("dense", seq_len) for seq_len in (64, 300, 1024, 2048)),
    ],
)
def test_attention(implementation: str, seq_len: int, backward: bool) -> None:
    predicted = estimate(implementation, 1, seq_len, 4, 2, backward).extra
    assert predicted == pytest.approx(peak_of_attention(implementation, 1, seq_len, 4, 2, backward), rel=0.1)


@PASSES
@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (6, 3)])
@pytest.mark.parametrize("implementation", ["chunked", "naive", "dense"])
def test_attention_of_other_groups_and_batches(implementation: str, heads: tuple[int, int], backward: bool) -> None:
    predicted = estimate(implementation, 2, 150, *heads, backward).extra
    assert predicted == pytest.approx(peak_of_attention(implementation, 2, 150, *heads, backward), rel=0.1)


@PASSES
@pytest.mark.parametrize(
    ("implementation", "seq_len"),
    [("chunked", 64), ("chunked", 500), ("naive", 64), ("naive", 300), ("dense", 64), ("dense", 800)],
)
def test_model(implementation: str, seq_len: int, backward: bool) -> None:
    predicted = estimate_of(MODEL, implementation, 1, seq_len, backward).extra
    assert predicted == pytest.approx(peak_of_model(_as(MODEL, implementation), 1, seq_len, backward), rel=0.1)


@PASSES
@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": True, "layers": 4},
        {"tie_embeddings": False, "layers": 1},
        {"vocab_size": 8192, "layers": 1},
        {"nsa": replace(SMALL, compress="mlp")},
        {"ffn_dim": 1024, "kv_heads": 1},
    ],
    ids=["checkpointing", "untied", "vocabulary", "learned", "wide"],
)
def test_model_of_other_shapes(changes: dict[str, object], backward: bool) -> None:
    config = replace(MODEL, **changes)  # type: ignore[arg-type]
    predicted = estimate_of(config, "chunked", 2, 120, backward).extra
    assert predicted == pytest.approx(peak_of_model(_as(config, "chunked"), 2, 120, backward), rel=0.1)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"checkpointing": True, "layers": 4}, {"vocab_size": 8192, "layers": 1}],
    ids=["plain", "checkpointing", "vocabulary"],
)
def test_model_under_autocast(attention: str, changes: dict[str, object]) -> None:
    config = replace(MODEL, attention=attention, **changes)  # type: ignore[arg-type]
    implementation, seq_len = "dense" if attention == "dense" else "chunked", 300
    model, tokens = NSATransformer(config), torch.randint(config.vocab_size, (2, seq_len))

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()

    predicted = estimate_of(config, implementation, 2, seq_len, True, autocast=torch.bfloat16)
    assert predicted.extra == pytest.approx(measure_peak(call, CPU, 0).extra, rel=0.1)
    assert predicted.parameters == sum(p.nbytes for p in model.parameters())


def _as(config: ModelConfig, implementation: str) -> ModelConfig:
    if implementation == "dense":
        return replace(config, attention="dense")
    return replace(config, backend=implementation)


@pytest.mark.parametrize("compress", ["mean", "mlp"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_predicted_parameters_are_the_models(attention: str, tie: bool, compress: str) -> None:
    config = replace(MODEL, tie_embeddings=tie, attention=attention, nsa=replace(SMALL, compress=compress))
    model = NSATransformer(config)
    implementation = "dense" if attention == "dense" else "chunked"
    predicted = estimate_of(config, implementation, 1, 8, True, optimizer="adamw")
    assert predicted.parameters == sum(p.nbytes for p in model.parameters())
    assert predicted.optimizer == 2 * predicted.parameters


def test_unknown_implementation_is_named() -> None:
    with pytest.raises(InputError, match=r"^implementation: 'fast': use one of"):
        estimate("fast", 1, 64, 4, 2, False)


def test_a_model_without_a_branch_is_not_predicted() -> None:
    settings = {"implementation": "chunked", "batch": 1, "seq_len": 64, "dtype": torch.float32, "backward": True}
    with pytest.raises(InputError, match=r"^branches: \('win',\): use all three"):
        estimate_model(replace(MODEL, branches=("win",)), optimizer=None, device=CPU, **settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_last_three_pieces_decide_the_peak(device: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_ranges(first: int, last: int, step: int, _: torch.device) -> Iterator[tuple[int, int]]:
        return ((start, min(start + step, last)) for start in range(first, last, step))

    def estimates() -> list[MemoryEstimate]:
        common = {"query_heads": 6, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
        _trace.cache_clear()
        return [
            estimate_attention(
                NSAConfig(),
                implementation="chunked",
                batch=batch,
                seq_len=seq_len,
                backward=backward,
                device=torch.device(device),
                **common,
            )
            for seq_len in (31, 700, 1025, 3000)
            for backward in (False, True)
        ]

    short = estimates()
    monkeypatch.setattr(chunks, "_ranges", all_ranges)
    assert short == estimates()


def test_very_long_sequences_are_predicted_within_a_second() -> None:
    start = time.perf_counter()
    assert estimate("chunked", 1, 2**27, 12, 2, True).extra > 2**30
    assert time.perf_counter() - start < 1
