"""The sparse attention layer against the paper's model."""

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention
from nsa_core.errors import InputError
from nsa_core.functional import BRANCHES
from nsa_core.layer import DenseAttention, LearnedCompression, NativeSparseAttention
from nsa_core.routes import capture

SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=10)


def layer_of(compress: str = "mean", **changes: object) -> NativeSparseAttention:
    torch.manual_seed(0)
    config = NSAConfig(8, 4, 8, 4, window=10, compress=compress)  # type: ignore[arg-type]
    layer = NativeSparseAttention(24, 4, 2, 8, config, **changes).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(layer.gate_proj.weight)
    return layer


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float = 10_000.0) -> torch.Tensor:
    """RoPE written with complex numbers."""
    half = x.shape[-1] // 2
    turn = torch.polar(
        torch.ones(len(positions), half, dtype=x.dtype),
        positions[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half),
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * turn[:, None]
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("compress", ["mean", "mlp"])
def test_layer_agrees_with_the_papers_formulas(compress: str) -> None:
    """Compared with projections, rotation, compression before rotation, gates and output written out here."""
    layer, x = layer_of(compress), torch.randn(2, 53, 24, dtype=torch.float64)
    positions = torch.arange(53.0, dtype=torch.float64)
    q = rotated((x @ layer.q_proj.weight.T).view(2, 53, 4, 8), positions)
    k_raw, k_slc, k_win = (x @ w.T for w in layer.k_proj.weight.chunk(3))
    v_cmp, v_slc, v_win = ((x @ w.T).view(2, 53, 2, 8) for w in layer.v_proj.weight.chunk(3))
    raw = k_raw.view(2, 53, 2, 8)
    blocks = [(raw[:, i : i + 8], v_cmp[:, i : i + 8]) for i in range(0, 53 - 7, 4)]
    if compress == "mean":
        short_k, short_v = (torch.stack([b[j].mean(1) for b in blocks], 1) for j in (0, 1))
    else:
        maps = (layer.compress_k, layer.compress_v)
        short_k, short_v = (torch.stack([_phi(maps[j], b[j]) for b in blocks], 1) for j in (0, 1))
    keys = (raw, rotated(k_slc.view(2, 53, 2, 8), positions), rotated(k_win.view(2, 53, 2, 8), positions))
    gates = torch.sigmoid(x @ layer.gate_proj.weight.T + layer.gate_proj.bias).view(2, 53, 4, 3)
    k_cmp = rotated(short_k, positions[: len(blocks)] * 4)
    sides = (q, keys, (v_cmp, v_slc, v_win), gates, SMALL)
    out = nsa_attention(*sides, k_cmp=k_cmp, v_cmp=short_v, backend="reference")
    expected = out.flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-11)


def _phi(phi: LearnedCompression, block: torch.Tensor) -> torch.Tensor:
    """Compressed token [B,H,D] of one block [B,l,H,D]."""
    tokens = (block + phi.place[:, None]).transpose(1, 2).flatten(2)
    hidden = torch.nn.functional.silu(tokens @ phi.up.weight.T + phi.up.bias)
    return hidden @ phi.down.weight.T + phi.down.bias


@pytest.mark.parametrize("cmp_block", [4, 8, 12])
def test_learned_compression_is_the_mlp_of_every_unfolded_block(cmp_block: int) -> None:
    """Blocks without overlap, and with one and two shared strides; a tail shorter than a block."""
    config = NSAConfig(cmp_block=cmp_block, cmp_stride=4, slc_block=12, slc_count=3, window=8)
    torch.manual_seed(0)
    phi, x = LearnedCompression(config, 8).double(), torch.randn(2, 39, 3, 8, dtype=torch.float64, requires_grad=True)
    unfolded = torch.stack([_phi(phi, x[:, i : i + cmp_block]) for i in range(0, 40 - cmp_block, 4)], 1)
    out, weights = phi(x), torch.randn_like(unfolded)
    torch.testing.assert_close(out, unfolded, rtol=1e-12, atol=1e-12)
    leaves = [x, *phi.parameters()]
    for got, want in zip(
        torch.autograd.grad(out, leaves, weights), torch.autograd.grad(unfolded, leaves, weights), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("branches", [("cmp",), ("slc",), ("win",), ("win", "cmp")])
@pytest.mark.parametrize("compress", ["mean", "mlp"])
def test_a_layer_of_some_branches_is_the_whole_one_without_the_others(branches: tuple[str, ...], compress: str) -> None:
    if branches == ("slc",) and compress == "mlp":
        with pytest.raises(InputError, match=r"^branches: .*add \"cmp\""):
            layer_of(compress, branches=branches)
        return
    whole, layer, x = layer_of(compress), layer_of(compress, branches=branches), torch.randn(1, 53, 24).double()
    own = [i for i, name in enumerate(BRANCHES) if name in branches]
    keyed = [i for i, name in enumerate(BRANCHES) if name in branches or (name, *branches) == ("cmp", "slc")]
    assert layer.k_proj.weight.shape == (len(keyed) * 16, 24)  # no weights for keys that nothing reads
    taken = whole.state_dict()
    taken["k_proj.weight"] = taken["k_proj.weight"].unflatten(0, (3, 16))[keyed].flatten(0, 1)
    taken["v_proj.weight"] = taken["v_proj.weight"].unflatten(0, (3, 16))[own].flatten(0, 1)
    for name in ("gate_proj.weight", "gate_proj.bias"):
        taken[name] = taken[name].unflatten(0, (4, 3))[:, own].flatten(0, 1)
    layer.load_state_dict(taken, strict="cmp" in branches)
    q, k, v, gates = whole._project(x, torch.arange(53))
    k_cmp, v_cmp = whole._compress(k[0], v[0], 0)
    expected = nsa_attention(q, k, v, gates, whole.config, k_cmp=k_cmp, v_cmp=v_cmp, branches=branches)
    with capture() as runs:
        out = layer(x)
    torch.testing.assert_close(out, whole.out_proj(expected.flatten(2)), rtol=1e-9, atol=1e-11)
    assert {run.branch for run in runs} == {*branches, *(["select"] if "slc" in branches else [])}
    apart = torch.cat([layer(part) for part in x.split([20, 33], 1)], 1)
    torch.testing.assert_close(layer(x, cu_seqlens=torch.tensor([0, 20, 53])), apart, rtol=1e-9, atol=1e-11)
    out.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_layer_of_some_branches_does_not_decode() -> None:
    layer = layer_of(branches=["win"])
    with pytest.raises(InputError, match=r"^branches: \('win',\): use all three"):
        layer(torch.randn(1, 4, 24).double(), layer.new_cache())


@torch.no_grad()
def test_a_backend_per_branch_serves_prefill_and_steps() -> None:
    x = torch.randn(1, 30, 24, dtype=torch.float64)
    layer = layer_of(backend={"slc": "naive", "select": "reference"})
    cache = layer.new_cache()
    steps = torch.cat([layer(x[:, :20], cache), layer(x[:, 20:], cache)], 1)
    torch.testing.assert_close(steps, layer_of()(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layer", [NativeSparseAttention(32, 4, 2, 8), DenseAttention(32, 4, 2, 8)])
@pytest.mark.parametrize("shape", [(0, 5, 32), (2, 0, 32)])
def test_an_empty_batch_gives_an_empty_result(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    assert layer(torch.empty(shape)).shape == shape
