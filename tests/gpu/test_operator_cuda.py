"""The chunked backend on a CUDA device: values, gradients, selection, determinism, no host synchronisation."""

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention, select_blocks

SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24)


def operands(tokens, heads, kv_heads, dim, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(1, tokens, heads, dim), (1, tokens, kv_heads, dim), (1, tokens, kv_heads, dim)]
    tensors = [torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes]
    gates = torch.rand(1, tokens, heads, 3, generator=generator, device="cuda").to(dtype)
    return [x.requires_grad_() for x in (*tensors, gates)]


def run(leaves, config, backend):
    out = nsa_attention(*leaves, config, backend=backend)
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, weights)]


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 100, 777])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 64), (4, 4, 128), (16, 1, 32)])
def test_float32_is_the_oracle(tokens, heads, kv_heads, dim):
    leaves = operands(tokens, heads, kv_heads, dim, torch.float32)
    pairs = zip(run(leaves, SMALL, "chunked"), run(leaves, SMALL, "reference"), strict=True)
    assert all((got - want).abs().max() < 1e-3 for got, want in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_an_eager_run(dtype):
    leaves = operands(2500, 12, 2, 64, dtype)
    blocks = {name: select_blocks(*leaves[:2], NSAConfig(), backend=name) for name in ("chunked", "reference")}
    different = (blocks["chunked"] != blocks["reference"]).any(-1).float().mean().item()
    assert different < 1e-3  # only scores that differ in the last bits of float32 may swap
    exact = run([x.detach().double().requires_grad_() for x in leaves], NSAConfig(), "reference")
    eager, actual = run(leaves, NSAConfig(), "naive"), run(leaves, NSAConfig(), "chunked")
    for got, other, want in zip(actual, eager, exact, strict=True):
        assert distance(got, want) <= 2 * distance(other, want)


def test_the_same_input_gives_the_same_bits_twice():
    def once():
        return run(operands(5000, 12, 2, 64, torch.bfloat16), NSAConfig(), "chunked")

    assert all(torch.equal(x, y) for x, y in zip(once(), once(), strict=True))


def test_nothing_waits_for_the_device():
    leaves = operands(3000, 12, 2, 64, torch.bfloat16)
    run(leaves, NSAConfig(), "chunked")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(leaves, NSAConfig(), "chunked")
    finally:
        torch.cuda.set_sync_debug_mode("default")
