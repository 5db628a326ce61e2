"""The forward that is Hopper's own (span_hopper.py) against the one of all devices (span.py)."""

import pytest
import torch

from nsa_core import NSAConfig
from nsa_core.kernels import span
from nsa_core.kernels.plan import Part, Plan
from nsa_core.kernels.stages import observe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def spans(tokens, heads, kv_heads, dtype, config, rows=None):
    """(q, parts, plan) of all branches, of two sequences whose last `rows` tokens have queries."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    compressed = max(0, (tokens - config.cmp_block) // config.cmp_stride + 1)
    sizes = (rows or tokens, heads), *((n, kv_heads) for n in (compressed, compressed, tokens, tokens))
    q, kc, vc, k, v = (torch.randn(2, *size, 128, generator=generator, device="cuda").to(dtype) for size in sizes)
    parts = [Part("cmp", kc, vc), Part("slc", k, v), Part("win", k, v)]
    return q, parts, Plan(config, ("cmp", "slc", "win"), tokens - q.shape[1], 128**-0.5, shared=True)


def attended(monkeypatch, groups, case):
    """Outputs and log-sum-exps of `groups` warpgroups; of 0, by the kernel of all devices."""
    monkeypatch.setattr(span, "_warpgroups", lambda *given: groups)
    return [x for pair in span.forward(*case) for x in pair]


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"), [(8, 2, torch.float16), (8, 1, torch.bfloat16), (32, 2, torch.bfloat16)]
)
@pytest.mark.parametrize("tokens", [1, 31, 64, 1000, 1025, 2064])
def test_it_attends_as_the_other_does_and_the_same_twice(monkeypatch, tokens, heads, kv_heads, dtype, groups):
    case = spans(tokens, heads, kv_heads, dtype, NSAConfig())
    want = attended(monkeypatch, 0, case)
    first, second = (attended(monkeypatch, groups, case) for _ in range(2))
    for got, again, expected in zip(first, second, want, strict=True):
        assert torch.equal(got, again)
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("sizes", [{"init_blocks": 0}, {"window": 200, "slc_count": 5}, {"local_blocks": 4}], ids=str)
def test_other_sizes_and_rows_at_the_end(monkeypatch, sizes):
    case = spans(1500, 16, 2, torch.bfloat16, NSAConfig(**sizes), rows=700)
    pairs = zip(attended(monkeypatch, 3, case), attended(monkeypatch, 0, case), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize(("tokens", "heads", "groups"), [(2048, 8, 2), (49_200, 8, 3), (49_200, 32, 3)])
def test_who_takes_it(tokens, heads, groups):
    with observe() as started:
        span.forward(*spans(tokens, heads, 2, torch.bfloat16, NSAConfig()))
    assert [(one.kernel, one.constants["M"]) for one in started] == [("_all_spans_forward", 64 * groups)]


@pytest.mark.parametrize("groups", [2, 3])
def test_values_and_gradients_are_as_good_as_an_eager_run(make_case, monkeypatch, groups):
    monkeypatch.setattr(span, "_warpgroups", lambda q, parts, plan: groups * (plan.shared and len(parts) == 3))
    case = make_case(1200, 32, 2, 128)
    with observe() as started:
        errors = case.errors(NSAConfig(slc_count=8))
    assert "_all_spans_forward" in {one.kernel for one in started}
    assert all(ours <= 2 * eager for ours, eager in errors)
