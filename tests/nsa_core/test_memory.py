"""Predicted memory against the CPU allocator's own count, for every benchmarked path; tests/gpu has a device's.

No Triton kernel runs: allocations follow from shapes alone, so the kernels' host code runs here without launches.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from jobs.measure.memory import measure_peak
from nsa_core import NSAConfig, dense_attention, memory, nsa_attention
from nsa_core.backends.triton import triton_problem
from nsa_core.errors import InputError
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model, predicts
from nsa_core.model import PRESETS, ModelConfig, NSATransformer

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=64)
MODEL = replace(PRESETS["tiny"], dim=128, heads=4, kv_heads=2, head_dim=32, ffn_dim=384, vocab_size=512, nsa=SMALL)
PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def host_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels' host code on the CPU, without launches."""
    from nsa_core.kernels.runtime import launch

    monkeypatch.setattr("nsa_core.backends.triton.unavailable", lambda device, dtype: None)
    with launch.handed_to(lambda one: None):
        yield


def peak_of_attention(
    implementation: str, batch: int, seq_len: int, heads: tuple[int, int], backward: bool, dtype: torch.dtype
) -> int:
    def tensor(*tail: int) -> Tensor:
        return torch.randn(batch, seq_len, *tail, dtype=dtype, requires_grad=backward)

    q, k, v, gates = tensor(heads[0], 32), tensor(heads[1], 32), tensor(heads[1], 32), tensor(heads[0], 3)
    inputs = [q, k, v] if implementation == "dense" else [q, k, v, gates]
    towards = torch.randn(batch, seq_len, heads[0], 32, dtype=dtype)

    def call() -> object:
        with torch.set_grad_enabled(backward):
            if implementation == "dense":
                out = dense_attention(q, k, v)
            else:
                out = nsa_attention(q, k, v, torch.sigmoid(gates), SMALL, backend=implementation)
        return out, torch.autograd.grad(out, inputs, towards) if backward else None

    return measure_peak(call, CPU, 0).extra


def estimate(
    implementation: str, batch: int, seq_len: int, heads: tuple[int, int] = (4, 2), backward: bool = True,
    dtype: torch.dtype = FP32, config: NSAConfig = SMALL, head_dim: int = 32, device: str = "cpu",
) -> MemoryEstimate:  # fmt: skip
    sizes = {"batch": batch, "seq_len": seq_len, "query_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
    kind = {"dtype": dtype, "backward": backward, "device": torch.device(device)}
    return estimate_attention(config, implementation=implementation, **sizes, **kind)


@PASSES
@pytest.mark.parametrize(
    ("implementation", "batch", "seq_len", "heads"),
    [
        *(("chunked", 1, seq_len, (4, 2)) for seq_len in (50, 128, 800)),
        *(("naive", 1, seq_len, (4, 2)) for seq_len in (64, 300)),
        ("reference", 1, 200, (4, 2)),
        *(("dense", 1, seq_len, (4, 2)) for seq_len in (64, 300, 2048)),
        *((one, 2, 150, (6, 1)) for one in ("chunked", "naive", "dense")),
        *((one, 2, 150, (4, 4)) for one in ("chunked", "dense")),
    ],
)
def test_attention(implementation: str, batch: int, seq_len: int, heads: tuple[int, int], backward: bool) -> None:
    seen = peak_of_attention(implementation, batch, seq_len, heads, backward, FP32)
    assert estimate(implementation, batch, seq_len, heads, backward).extra == pytest.approx(seen, rel=0.1)


@needs_triton
@PASSES
@pytest.mark.parametrize(
    ("batch", "seq_len", "heads", "dtype"),
    [
        (1, 7, (4, 2), FP32),  # no compressed token
        (1, 64, (4, 2), FP32),  # every block is selected
        (1, 600, (6, 1), FP32),
        (2, 3000, (8, 2), BF16),  # slots of several chunks
    ],
)
def test_attention_by_kernels(
    batch: int, seq_len: int, heads: tuple[int, int], dtype: torch.dtype, backward: bool, host_code: None
) -> None:
    seen = peak_of_attention("triton", batch, seq_len, heads, backward, dtype)
    assert estimate("triton", batch, seq_len, heads, backward, dtype).extra == pytest.approx(seen, rel=0.01)


def check_model(config: ModelConfig, implementation: str, batch: int, seq_len: int, backward: bool, autocast: bool):
    dense = implementation == "dense"
    config = replace(config, attention="dense" if dense else "nsa", backend="auto" if dense else implementation)
    model = NSATransformer(config)
    tokens = torch.randint(config.vocab_size, (batch, seq_len))

    def call() -> object:
        with torch.set_grad_enabled(backward), torch.autocast("cpu", BF16) if autocast else nullcontext():
            loss = model(tokens, tokens)
        return loss, loss.backward() if backward else None

    settings = {"batch": batch, "seq_len": seq_len, "backward": backward, "autocast": BF16 if autocast else None}
    common = {"dtype": FP32, "optimizer": None, "device": CPU}
    predicted = estimate_model(config, implementation=implementation, **settings, **common)
    assert predicted.extra == pytest.approx(measure_peak(call, CPU, 0).extra, rel=0.1)
    assert predicted.parameters == sum(p.nbytes for p in model.parameters())


SHAPES = {
    "plain": {},
    "checkpointing": {"checkpointing": True, "layers": 4},
    "untied": {"tie_embeddings": False, "layers": 1},
    "vocabulary": {"vocab_size": 8192, "layers": 1},
    "learned": {"nsa": replace(SMALL, compress="mlp")},
    "wide": {"ffn_dim": 1024, "kv_heads": 1},
}


@PASSES
@pytest.mark.parametrize(
    ("implementation", "batch", "seq_len", "shape"),
    [
        *(("chunked", 1, seq_len, "plain") for seq_len in (64, 500)),
        *(("chunked", 2, 120, shape) for shape in SHAPES),
        ("naive", 1, 300, "plain"),
        *(("dense", 1, seq_len, "plain") for seq_len in (64, 800)),
    ],
)
def test_model(implementation: str, batch: int, seq_len: int, shape: str, backward: bool) -> None:
    config = replace(MODEL, **SHAPES[shape])  # type: ignore[arg-type]
    check_model(config, implementation, batch, seq_len, backward, autocast=False)


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
@pytest.mark.parametrize("shape", ["plain", "checkpointing", "vocabulary"])
def test_model_under_autocast(implementation: str, shape: str) -> None:
    check_model(replace(MODEL, **SHAPES[shape]), implementation, 2, 300, True, autocast=True)  # type: ignore[arg-type]


@needs_triton
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("shape", ["plain", "checkpointing", "learned"])
def test_model_by_kernels(shape: str, autocast: bool, host_code: None) -> None:
    check_model(replace(MODEL, **SHAPES[shape]), "triton", 2, 600, True, autocast)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_training_step_has_the_optimizers_state(layers: int) -> None:
    config = replace(MODEL, layers=layers, tie_embeddings=False)
    settings = {"batch": 1, "seq_len": 8, "dtype": FP32, "backward": True, "optimizer": "adamw", "device": CPU}
    with torch.inference_mode():  # of the caller: it changes nothing
        predicted = estimate_model(config, implementation="chunked", **settings)
    assert predicted.parameters == sum(p.nbytes for p in NSATransformer(config).parameters())
    assert (predicted.optimizer, predicted.inputs) == (2 * predicted.parameters, 2 * 8 * 8)


def test_what_is_not_predicted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^implementation: 'fast': use one of"):
        estimate("fast", 1, 64)
    settings = {"implementation": "chunked", "batch": 1, "seq_len": 64, "dtype": FP32, "backward": True}
    with pytest.raises(InputError, match=r"^branches: \('win',\): use all three"):
        estimate_model(replace(MODEL, branches=("win",)), optimizer=None, device=CPU, **settings)
    assert predicts("chunked")
    monkeypatch.setattr("nsa_core.backends.triton.find_spec", lambda name: None)
    monkeypatch.setattr("nsa_core.backends.triton.triton_problem", triton_problem.__wrapped__)  # as if never asked
    assert not predicts("triton")
    with pytest.raises(InputError, match=r"^implementation: 'triton': it needs Triton: pip install"):
        estimate("triton", 1, 64)


@needs_triton
def test_longer_sequences_than_are_traced_continue_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [estimate("triton", batch, 2**17) for batch in (1, 3)]
    monkeypatch.setattr(memory, "_LONGEST", 2**16)  # half of it is beyond the least of any buffer
    for batch, traced in zip((1, 3), whole, strict=True):
        assert estimate("triton", batch, 2**17).extra == pytest.approx(traced.extra, rel=0.02)


@needs_triton
@pytest.mark.parametrize("implementation", ["chunked", "triton"])
def test_the_longest_sequences_are_predicted_from_shorter_ones(implementation: str) -> None:
    assert estimate(implementation, 2**20, 2**27, (12, 2), config=NSAConfig()).extra > 2**30
