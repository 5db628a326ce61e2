"""The chunked backend on a CUDA device: values, gradients, selection, determinism, no host synchronisation."""

import pytest
import torch

from nsa_core import NSAConfig

PAPER = NSAConfig()
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24)


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 100, 777])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 64), (4, 4, 128), (16, 1, 32)])
def test_float32_is_the_oracle(make_case, tokens, heads, kv_heads, dim):
    case = make_case(tokens, heads, kv_heads, dim, torch.float32)
    pairs = zip(case.run(SMALL, "chunked"), case.run(SMALL, "reference"), strict=True)
    assert all((got - want).abs().max() < 1e-3 for got, want in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_an_eager_run(make_case, dtype):
    case = make_case(2500, dtype=dtype)
    different = (case.blocks(PAPER, "chunked") != case.blocks(PAPER, "reference")).any(-1).float().mean().item()
    assert different < 1e-3  # only scores that differ in the last bits of float32 may swap
    exact = case.to(torch.float64).run(PAPER, "reference")
    eager, actual = case.run(PAPER, "naive"), case.run(PAPER, "chunked")
    for got, other, want in zip(actual, eager, exact, strict=True):
        assert distance(got, want) <= 2 * distance(other, want)


def test_the_same_input_gives_the_same_bits_twice(make_case):
    case = make_case(5000)
    first, second = (case.run(PAPER, "chunked") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_nothing_waits_for_the_device(make_case):
    case = make_case(3000)
    case.run(PAPER, "chunked")
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(PAPER, "chunked")
    finally:
        torch.cuda.set_sync_debug_mode("default")
