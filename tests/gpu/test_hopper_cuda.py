"""The kernels that are Hopper's own (*_hopper.py) against those of all devices."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nsa_core import NSAConfig, nsa_attention
from nsa_core.kernels import attention, merge, scores
from nsa_core.kernels.call import Call, Part
from nsa_core.kernels.merge import Rows, Slots
from nsa_core.kernels.runtime.launch import observe
from nsa_core.kernels.selected.inverse import invert
from nsa_core.kernels.selected.kernels import backward_chunk, forward_chunk
from nsa_core.kernels.shared import hopper
from nsa_core.kernels.shared.hopper import product
from nsa_core.kernels.shared.packed_slots import WORDS, store_packed
from nsa_core.kernels.span.backward_q import backward_q
from nsa_core.kernels.span.forward import attend_spans

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
GROUPS = pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype"), [(8, 2, torch.float16), (8, 1, torch.bfloat16), (32, 2, torch.bfloat16)]
)


def spans(tokens, heads, kv_heads, dtype, config, rows=None):
    """(q, parts, call) of all branches, of two sequences whose last `rows` tokens have queries."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    compressed = max(0, (tokens - config.cmp_block) // config.cmp_stride + 1)
    sizes = (rows or tokens, heads), *((n, kv_heads) for n in (compressed, compressed, tokens, tokens))
    q, kc, vc, k, v = (torch.randn(2, *size, 128, generator=generator, device="cuda").to(dtype) for size in sizes)
    parts = [Part("cmp", kc, vc), Part("slc", k, v), Part("win", k, v)]
    return q, parts, Call(config, ("cmp", "slc", "win"), tokens - q.shape[1], 128**-0.5, shared=True)


def of_forward(case):
    """A run that gives outputs and log-sum-exps of the spans."""
    return lambda: [x for given in attend_spans(*case) for x in given]


def of_backward_q(case):
    """A run that gives the gradient of queries."""
    q, parts, call = case
    outputs, lses = attend_spans(*case)
    generator = torch.Generator("cuda").manual_seed(1)
    gates = torch.rand(*q.shape[:3], 3, generator=generator, device="cuda").to(q.dtype)
    do = torch.randn(q.shape, generator=generator, device="cuda").to(q.dtype)
    _, stats = merge.prepare(outputs, lses, gates, do, True)
    return lambda: [backward_q(q, do, parts, stats, call)]


def chosen(case):
    """The inverse of what the queries choose."""
    q, parts, call = case
    _, (lse, *_) = attend_spans(*case)
    blocks = scores.select(q, parts[0].k, lse, call, call.causal_rows(q.shape[1]))
    return invert(q, parts[1], blocks, call)


def unwritten(slots):
    """The chunk's slots, of which what is not written is no number."""
    for x in (slots.parts, slots.lse):
        x.fill_(float("nan") if x.is_floating_point() else -1)
    if slots.exponents is not None:
        slots.exponents.fill_(-1)
    return slots


def numbers(slots):
    """Values of the chunk's slots [rows,free,G,128], unpacked (shared/packed_slots.py)."""
    count = slots.rows.count
    if slots.exponents is None:
        return slots.parts[:count].clone()
    words = slots.parts[:count].unflatten(-1, (3, 4, 4))
    low, tops = words & 0xFFFFFF, (words >> 24) & 0xFF
    last = tops[..., 0, :, :] | tops[..., 1, :, :] << 8 | tops[..., 2, :, :] << 16
    pairs = torch.stack([*low.unbind(-3), last], -1)  # [.., block, run, pair]
    signed = torch.stack([pairs & 0xFFF, pairs >> 12], -1) - 2048
    shifts = 8 * torch.arange(4, dtype=torch.int32, device=pairs.device)
    exponents = (slots.exponents[:count, ..., None] >> shifts) & 0xFF
    units = (exponents << 23).view(torch.float32) / 1024
    return (signed * units[..., None, None, None]).movedim(-4, -2).flatten(-4)


def of_selected_forward(case):
    """A run that gives the slots of all chunks."""
    q, parts, call = case
    index = chosen(case)

    def run():
        found = []
        for chunk, slots in enumerate(attention._slots(q, parts[1], index, call)):
            forward_chunk(q, parts[1], unwritten(slots), index, chunk, call)
            found += [numbers(slots), slots.lse[: slots.rows.count].clone()]
        return found

    return run


def of_selected_backward(case):
    """A run that gives the gradients of keys and values, and the slots of all chunks."""
    q, parts, call = case
    index, generator = chosen(case), torch.Generator("cuda").manual_seed(1)
    do = torch.randn(q.shape, generator=generator, device="cuda").to(q.dtype)
    stats = torch.randn(*q.shape[:3], 2, generator=generator, device="cuda")
    stats[..., 0] += 4  # log-sum-exps, so that probabilities are below 1, mostly

    def run():
        totals = torch.zeros(2, *parts[1].k.shape, device="cuda")
        scratch = torch.full((2, index.limit, call.config.slc_block, 128), float("nan"), device="cuda")
        found = [*totals]
        for chunk, slots in enumerate(attention._slots(q, parts[1], index, call, do)):
            unwritten(slots)
            backward_chunk(q, do, parts[1], stats, slots, tuple(totals), tuple(scratch), index, chunk, call)
            found.append(numbers(slots))
        return found

    return run


def assert_as_elsewhere(monkeypatch, run, kernel):
    """It starts `kernel`, gives the same bits twice, and what the kernels of all devices give."""
    with observe() as started:
        first, second = run(), run()
    assert kernel in {one.kernel for one in started}
    monkeypatch.setattr(hopper, "arch", lambda x: 80)
    with observe() as started:
        expected = run()
    assert kernel not in {one.kernel for one in started}
    for got, again, want in zip(first, second, expected, strict=True):
        assert torch.equal(got, again)
        if want.dtype == torch.float32 and want.dim() == 3:  # log-sum-exps
            torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
        else:
            close = {"rtol": 1e-2, "atol": 4e-3 * max(1.0, want.abs().max().item())}
            torch.testing.assert_close(got.float(), want.float(), **close)


@GROUPS
@pytest.mark.parametrize("tokens", [32, 64, 1000, 1025, 2064])
@pytest.mark.parametrize(
    ("made", "kernel"), [(of_forward, "_all_spans_forward"), (of_backward_q, "_all_spans_backward_q")]
)
def test_spans(monkeypatch, tokens, heads, kv_heads, dtype, made, kernel):
    case = spans(tokens, heads, kv_heads, dtype, NSAConfig())
    assert_as_elsewhere(monkeypatch, made(case), kernel)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (8, 1), (32, 2)])
@pytest.mark.parametrize("tokens", [1025, 1100, 3000])
@pytest.mark.parametrize(
    ("made", "kernel"),
    [(of_selected_forward, "_selected_forward_hopper"), (of_selected_backward, "_selected_backward_hopper")],
)
def test_free_blocks(monkeypatch, tokens, heads, kv_heads, made, kernel):
    case = spans(tokens, heads, kv_heads, torch.bfloat16, NSAConfig())
    assert_as_elsewhere(monkeypatch, made(case), kernel)


@GROUPS
@pytest.mark.parametrize("tokens", [20, 40, 1000, 2064])
@pytest.mark.parametrize("half_gates", [True, False])
def test_what_keeps_nothing_for_a_backward_gives_the_same_bits(make_case, tokens, heads, kv_heads, dtype, half_gates):
    case = make_case(tokens, heads, kv_heads, 128, dtype, batch=2)
    gates = case.gates if half_gates else case.gates.float()
    kept = nsa_attention(case.q, case.k, case.v, gates, NSAConfig(), backend="triton")
    with torch.no_grad(), observe() as started:
        alone = [nsa_attention(case.q, case.k, case.v, gates, NSAConfig(), backend="triton") for _ in range(2)]
    assert torch.equal(alone[0], alone[1])
    assert torch.equal(alone[0], kept)
    summed = [one.constants["SUMMED"] for one in started if one.kernel == "_all_spans_forward"]
    assert summed == [True, True] * (tokens >= 32)  # else there are no compressed keys to describe


OTHER_SIZES = [{"init_blocks": 0}, {"window": 200, "slc_count": 5}, {"local_blocks": 4}]


@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=str)
@pytest.mark.parametrize(
    ("made", "kernel"),
    [
        (of_forward, "_all_spans_forward"),
        (of_backward_q, "_all_spans_backward_q"),
        (of_selected_forward, "_selected_forward_hopper"),
        (of_selected_backward, "_selected_backward_hopper"),
    ],
)
def test_other_sizes_and_rows_at_the_end(monkeypatch, made, kernel, sizes):
    case = spans(1500, 16, 2, torch.bfloat16, NSAConfig(**sizes), rows=700)
    assert_as_elsewhere(monkeypatch, made(case), kernel)


@pytest.mark.parametrize("sound", [0, 1])
def test_what_is_no_number_stays_in_its_sequence(sound):
    """Tiles of a sequence's last keys reach into the next one, and a program goes on with rows of another sequence."""
    q, parts, call = spans(4000, 8, 2, torch.bfloat16, NSAConfig())
    want = [x[sound].clone() for given in attend_spans(q, parts, call) for x in given]
    for part in parts:
        part.k[1 - sound], part.v[1 - sound] = float("nan"), float("nan")
    got = [x[sound] for given in attend_spans(q, parts, call) for x in given]
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@gluon.jit
def _pack(x, factor, parts, exponents, count):
    """The first `count` rows of x [64,128] times factor [64]."""
    LAYOUT: gl.constexpr = product(128)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    store_packed(gl.load(x + r[:, None] * 128 + d[None, :]), gl.load(factor + r), parts, exponents, r, r < count)


@pytest.mark.parametrize("size", [1.0, 2.0**-60, 2.0**100])
def test_integers_are_off_by_half_a_unit(size):
    """Zeros, integers that round up to the next power of two, and integers beside far larger ones."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, factor = torch.randn(64, 128, generator=generator, device="cuda"), torch.ones(64, device="cuda")
    x[0], x[1], factor[2:30] = 0, torch.tensor([1.0, -1.0], device="cuda").repeat(64), 0.37
    x[3:20, 5] = 2 - 2.0 ** -torch.arange(3, 20, device="cuda")  # 2^-11 is half a unit below the next power of two
    x[20:40, ::7] *= 1e-4
    x[40:50, 64] *= 1e6
    x *= size
    slots = Slots(*(torch.full((64, 1, 1, *n), -1, dtype=torch.int32, device="cuda") for n in ((WORDS,), ())),
                  torch.empty(64, 1, 1, device="cuda"), Rows(1, 0, 64, 0, 50))  # fmt: skip
    _pack[(1,)](x, factor, slots.parts, slots.exponents, 50, num_warps=4)
    want = (x.double() * factor.double()[:, None])[:50]
    blocks = (want.unflatten(1, (4, 4, 4, 2)) - numbers(slots)[:, 0, 0].double().unflatten(1, (4, 4, 4, 2))).abs()
    largest = want.unflatten(1, (4, 4, 4, 2)).abs().amax((1, 2, 4))
    assert (blocks.amax((1, 2, 4)) <= 2.0**-11 * 1.001 * largest).all()
    assert (slots.parts[50:] == -1).all()
    assert (slots.exponents[50:] == -1).all()


def test_a_gradient_that_is_not_aligned(make_case):
    """The backward's kernels are those of all devices then, behind a forward of Hopper's own."""
    case = make_case(1200, 8, 2, 128)
    out = nsa_attention(*case.leaves, NSAConfig(), backend="triton")
    late = torch.randn(out.numel() + 4, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    late = late[4:].view(out.shape)
    with observe() as started:
        got = torch.autograd.grad(out, case.leaves, late, retain_graph=True)
    assert "_selected_backward" in {one.kernel for one in started}
    for ours, want in zip(got, torch.autograd.grad(out, case.leaves, late.clone()), strict=True):
        assert (ours - want).float().norm() < 8e-3 * want.float().norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_none_in_its_slots(bad):
    """Nor is what shares a power of two with it. Nothing else changes."""
    case = spans(1100, 16, 2, torch.bfloat16, NSAConfig())
    run, values = of_selected_forward(case), case[1][1].v
    want = run()[0]
    values[0, 200, 1, 0] = bad
    got = run()[0]
    chose = ~got[..., :1].isfinite()
    assert 0 < chose.float().mean() < 0.5
    hit = chose & (torch.arange(128, device="cuda") % 8 < 2)
    assert torch.equal(got.isfinite(), ~hit)
    assert torch.equal(got[~hit], want[~hit])


def outliers(case):
    """Make every 16th channel of keys and values 100 times larger."""
    for x in (case.k, case.v):
        x[..., ::16] *= 100
    case.q[..., ::16] *= 0.01  # the scores stay as they were


def large_mean(case):
    """Move the keys of each head far from zero: probabilities stay as they were."""
    case.k += 10 * torch.randn(case.k.shape[2:], generator=torch.Generator("cuda").manual_seed(2), device="cuda")


def peaked(case):
    """Make scores so large that few keys have all the probability."""
    case.q *= 8


def columns(got, want):
    """Error of each column, relative to the column: the last axis of `got`."""
    return (got.double() - want).flatten(0, -2).norm(dim=0) / want.flatten(0, -2).norm(dim=0)


@pytest.mark.large
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 4)])
@pytest.mark.parametrize("change", [None, outliers, large_mean, peaked])
def test_long_sequences_are_as_good_as_an_eager_run(make_case, change, heads, kv_heads):
    case, config = make_case(4096 + 100, heads, kv_heads, 128), NSAConfig()
    if change:
        with torch.no_grad():
            change(case)
    blocks = case.blocks(config)
    exact = case.to(torch.float64).with_blocks(blocks, config, "chunked")
    eager = case.with_blocks(blocks, config, "naive")
    with observe() as started:
        ours = case.run(config)
    assert {"_selected_forward_hopper", "_all_spans_backward_q"} <= {one.kernel for one in started}
    for got, other, want in zip(ours, eager, exact, strict=True):
        assert (got - want).norm() <= 2 * (other - want).norm()


@pytest.mark.large
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 4)])
def test_exact_slots_are_exact_beside_outliers(make_case, heads, kv_heads):
    """In every column; packed slots round the columns beside an outlier as coarsely as it."""
    case, config = make_case(4096 + 100, heads, kv_heads, 128), NSAConfig(slots="exact")
    with torch.no_grad():
        outliers(case)
    blocks = case.blocks(config)
    exact = case.to(torch.float64).with_blocks(blocks, config, "chunked")
    eager, ours, packed = case.with_blocks(blocks, config, "naive"), case.run(config), case.run(NSAConfig())
    for which in (0, 1):  # output and dq: the sums over slots
        least = columns(eager[which], exact[which])
        assert (columns(ours[which], exact[which]) <= 2 * least).all()
        assert (columns(packed[which], exact[which]) > 2 * least).any(), "packed slots are exact, too: say so in README"
