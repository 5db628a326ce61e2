"""Values and gradients of the Triton backend on a CUDA device, over heads, lengths, sizes, layouts; of chunked, too."""

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention
from nsa_core.errors import InputError
from nsa_core.kernels.runtime.launch import observe

PAPER = NSAConfig()
FEW = NSAConfig(slc_count=8)  # from 512 tokens on there are blocks to choose
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPANS_ON_HOPPER = {"_all_spans_forward", "_all_spans_backward_q"}
SELECTED_ON_HOPPER = {"_selected_forward_hopper", "_selected_backward_hopper"}


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def largest_error(got, want):
    """Largest error of an element, relative to the largest element or 1."""
    return ((got - want).abs().max() / want.abs().max().clamp(min=1)).item()


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "value_dim", "dtype"),
    [
        (1000, 12, 2, 64, 64, BF16),
        (777, 4, 4, 128, 128, BF16),
        (1200, 32, 2, 128, 128, BF16),
        (1000, 8, 2, 128, 128, FP16),
        (900, 6, 2, 96, 64, FP16),
        (900, 16, 2, 32, 32, BF16),
        (900, 3, 1, 192, 128, BF16),
        (700, 4, 2, 256, 256, FP16),
        (900, 8, 2, 64, 128, FP16),
    ],
)
def test_half_precision_is_as_good_as_an_eager_run(make_case, tokens, heads, kv_heads, dim, value_dim, dtype):
    case = make_case(tokens, heads, kv_heads, dim, dtype, value_dim=value_dim)
    assert all(ours <= 2 * eager for ours, eager in case.errors(FEW))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 64), (4, 4, 128)])
def test_one_branch_after_the_other_is_as_good(make_case, heads, kv_heads, dim):
    errors = make_case(900, heads, kv_heads, dim).errors(FEW, separately=True)
    assert all(ours <= 2 * eager for ours, eager in errors)


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 513])
def test_half_precision_at_any_length(make_case, tokens):
    case = make_case(tokens)
    for (ours, eager), x in zip(case.errors(PAPER), [case.q, *case.leaves], strict=True):
        assert ours <= 2 * eager + 1e-5 * x.numel() ** 0.5  # with one token q and k have zero gradients


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "value_dim"),
    [
        *((tokens, 12, 2, 64, 64) for tokens in (1, 2, 31, 32, 33, 100, 777)),
        *((tokens, 4, 4, 128, 128) for tokens in (1, 33, 777)),
        *((tokens, 16, 1, 32, 32) for tokens in (1, 33, 777)),
        *((333, *wide) for wide in ((2, 1, 256, 256), (3, 1, 96, 192), (8, 1, 192, 32))),
    ],
)
def test_float32_is_the_oracle(make_case, tokens, heads, kv_heads, dim, value_dim):
    case = make_case(tokens, heads, kv_heads, dim, FP32, value_dim=value_dim)
    exact = case.to(torch.float64).run(SMALL, "reference")
    assert all(largest_error(got, want) <= 1e-4 for got, want in zip(case.run(SMALL), exact, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        NSAConfig(slc_count=8, init_blocks=0),
        NSAConfig(slc_count=8, local_blocks=0),
        NSAConfig(slc_count=8, init_blocks=0, local_blocks=0),
        NSAConfig(slc_count=3),
        NSAConfig(slc_count=8, slc_block=32, init_blocks=2, window=100),
        NSAConfig(slc_count=4, slc_block=128),
        NSAConfig(slc_count=8, cmp_block=16),
        NSAConfig(cmp_block=12, cmp_stride=4, slc_block=24, slc_count=9, init_blocks=2, local_blocks=1, window=21),
    ],
    ids=["no initial", "no local", "none forced", "none free", "blocks of 32", "blocks of 128", "no overlap", "odd"],
)
def test_other_sizes_are_as_good_as_an_eager_run(make_case, config):
    assert all(ours <= 2 * eager for ours, eager in make_case(901, 8, 2).errors(config))


@pytest.mark.parametrize(("heads", "dim"), [(32, 64), (64, 64), (128, 64), (32, 128), (64, 128), (128, 128)])
def test_many_query_heads_to_one_kv_head(make_case, heads, dim):
    """They run, in whatever shared memory the card has, and are as good."""
    assert all(ours <= 2 * eager for ours, eager in make_case(700, heads, 1, dim).errors(FEW))


@pytest.mark.parametrize("rows", [1, 130])
def test_the_last_rows_behind_longer_keys(make_case, rows):
    """Near float64, as all rows are; with and without a choice of blocks."""
    assert all(ours <= 2 * eager for ours, eager in make_case(1331, rows=rows, batch=2).errors(FEW))
    assert all(ours <= 2 * eager for ours, eager in make_case(501, rows=rows, batch=2).errors(FEW))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"), [(12, 2, 64, BF16), (32, 8, 128, BF16), (8, 2, 128, FP16)]
)
@pytest.mark.parametrize("size", [3, 30])
def test_a_large_mean_of_the_keys(make_case, size, heads, kv_heads, dim, dtype):
    """It changes no probability, but the rounding of dq's parts before they cancel."""
    case = make_case(1331, heads, kv_heads, dim, dtype)
    with torch.no_grad():
        case.k += size * torch.randn(case.k.shape[2:], generator=torch.Generator("cuda").manual_seed(2), device="cuda")
    assert all(ours <= 2 * eager for ours, eager in case.errors(FEW))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("growth", [0.03, 0.3, -0.3])
def test_scores_that_grow_along_a_sequence(make_case, growth, dim):
    """Growth of 1 to 10 nats a tile of keys, or a fall: sums are rescaled late, seldom, or in every tile."""
    case = make_case(1331, dim=dim)
    with torch.no_grad():
        case.q[..., 0] = dim**0.5
        case.k[..., 0] = growth * torch.arange(1331, device="cuda")[:, None]
    assert all(ours <= 2 * eager for ours, eager in case.errors(FEW))


def test_all_queries_choose_one_block(make_case):
    """A block that every query selects takes far more work than the others."""
    case = make_case(4000)
    with torch.no_grad():
        case.k[:, 1280:1344] = case.q.mean(1, keepdim=True)[:, :, ::6] * 50
    blocks = case.blocks(PAPER)
    assert (blocks[:, 2000:] == 20).any(-1).float().mean() > 0.5
    exact = case.to(torch.float64).with_blocks(blocks, PAPER, "chunked")
    for got, want in zip(case.with_blocks(blocks, PAPER, "triton"), exact, strict=True):
        assert distance(got, want) < 8e-3


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "config", "bound"),
    [(12, 64, FP32, SMALL, 1e-5), (12, 64, BF16, SMALL, 8e-3), (8, 128, BF16, FEW, 8e-3)],
)
def test_gates_of_zero_and_one(make_case, heads, dim, dtype, config, bound):
    case = make_case(900, heads, 2, dim, dtype)
    with torch.no_grad():
        case.gates.copy_((case.gates > 0.5).float())
    blocks = case.blocks(config)
    exact = case.to(torch.float64).with_blocks(blocks, config, "chunked")
    for got, want in zip(case.run(config), exact, strict=True):
        assert distance(got, want) < bound


@pytest.mark.parametrize("way", [0, 1, 2])
@pytest.mark.parametrize("select", ["triton", "chunked"], ids=["all at once", "one after the other"])
def test_anomaly_detection_refuses_gates_below_zero(make_case, select, way):
    case, backend = make_case(900), dict.fromkeys(("cmp", "slc", "win"), "triton") | {"select": select}
    with torch.no_grad():
        case.gates[0, 700, 3, way] = -0.5
    nsa_attention(*case.leaves, FEW, backend=backend)  # a look at them would wait for the device
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with torch.no_grad():
            nsa_attention(*case.leaves, FEW, backend=backend)
        with pytest.raises(InputError, match=r"^gates: -0\.5: give gates of 0 or more"):
            nsa_attention(*case.leaves, FEW, backend=backend)


@pytest.mark.parametrize("way", [0, 1, 2])
@pytest.mark.parametrize("separately", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (8, 128)])  # the latter on Hopper: kernels of its own
def test_no_finite_gradient_is_wrong_for_a_gate_below_zero(make_case, heads, dim, separately, way):
    """Nor where the other gates are 0. Of q's gradient, only that row and head is NaN; the output is right."""
    case = make_case(900, heads, 2, dim)
    with torch.no_grad():
        case.gates[0, 100, 5] = 0  # a row that selects every block
        case.gates[0, 100, 5, way] = case.gates[0, 700, 3, way] = -0.5
    below, blocks = (case.gates < 0).any(-1), case.blocks(FEW)
    everywhere = torch.randn(case.q.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(BF16)
    for towards in (everywhere, everywhere * below[..., None]):  # the latter: their share alone, however small it is
        exact = case.to(torch.float64).with_blocks(blocks, FEW, "chunked", towards)
        got = case.with_blocks(blocks, FEW, "triton", towards) if separately else case.run(FEW, towards=towards)
        for x, want in zip(got, exact, strict=True):
            assert (x - want)[x.isfinite()].norm() < 2e-2 * want.norm()
        assert got[0].isfinite().all()
        assert torch.equal(got[1].isnan(), below[..., None].expand_as(got[1]))


def test_separate_keys_and_values_for_each_branch(make_case):
    def run(cases, backend):
        q, gates, keys, values = cases[0].q, cases[0].gates, [x.k for x in cases], [x.v for x in cases]
        out = nsa_attention(q, tuple(keys), tuple(values), gates, SMALL, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), [q, gates, *keys, *values])]

    cases = [make_case(777, dtype=FP32, seed=seed) for seed in range(3)]
    exact = run([case.to(torch.float64) for case in cases], "chunked")
    for got, want in zip(run(cases, "triton"), exact, strict=True):
        assert distance(got, want) < 1e-5


@pytest.mark.parametrize("longest", [None, 1500])
@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (8, 128)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_no_number_stays_in_its_packed_sequence(make_case, longest, heads, dim, value, bad):
    """In the longest and in a shorter one. Others keep their bits: one that chooses, one without a block, an empty one.

    On Hopper its own kernels of selected blocks run at head dim 128; those of spans would write across sequences' ends.
    """
    bounds = [0, 1500, 2200, 2204, 2204]
    options = {"cu_seqlens": torch.tensor(bounds, device="cuda"), "max_seqlen": longest}
    case, (start, end) = make_case(2204, heads, 2, dim), bounds[bad : bad + 2]

    def run(token=None):
        packed = [x[0].detach().clone() for x in case.leaves]
        for x in packed[:3]:
            if token is not None:
                x[token] = value
        with torch.no_grad():
            alone = nsa_attention(*packed, FEW, backend="triton", **options)
        return [alone, *type(case)(*(x.requires_grad_() for x in packed)).run(FEW, **options)]

    with observe() as started:
        sound = run()
    hopper = dim == 128 and torch.cuda.get_device_capability()[0] == 9
    ran = (SPANS_ON_HOPPER | SELECTED_ON_HOPPER) & {one.kernel for one in started}
    assert ran == (SELECTED_ON_HOPPER if hopper else set())
    for token in (start + 5, start + 600):  # among the first rows, and among those that choose
        for got, want in zip(run(token), sound, strict=True):
            assert not got[start:end].isfinite().all()
            assert torch.equal(got[:start], want[:start])
            assert torch.equal(got[end:], want[end:])


def test_a_batch_is_its_sequences(make_case):
    """Output, dq and dgates bit for bit; dk and dv are summed in other pieces."""
    case = make_case(901, batch=3)
    whole = nsa_attention(*case.leaves, FEW, backend="triton")
    out, dq, dk, dv, dgates = whole, *torch.autograd.grad(whole.square().sum(), case.leaves)
    for i in range(3):
        one = [x[i : i + 1].detach().requires_grad_() for x in case.leaves]
        alone = nsa_attention(*one, FEW, backend="triton")
        grads = torch.autograd.grad(alone.square().sum(), one)
        for got, want in ((alone, out), (grads[0], dq), (grads[3], dgates)):
            assert torch.equal(got[0], want[i])
        assert distance(grads[1][0], dk[i]) < 3e-3
        assert distance(grads[2][0], dv[i]) < 3e-3


def test_inputs_need_not_be_contiguous(make_case):
    case = make_case(901)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in case.leaves]
    joint = torch.stack([case.k, case.v], 2).detach().unbind(2)
    backwards = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in case.leaves]
    want = case.run(FEW)
    for given in (strided, [strided[0], *joint, strided[3]], backwards):
        assert not any(x.is_contiguous() for x in given)
        got = type(case)(*(x.requires_grad_() for x in given)).run(FEW)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_gradient_need_not_be_contiguous(make_case):
    case = make_case(901)
    out = nsa_attention(*case.leaves, FEW, backend="triton")
    towards = torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2)
    assert not towards.is_contiguous()
    ours = torch.autograd.grad(out, case.leaves, towards, retain_graph=True)
    want = torch.autograd.grad(out, case.leaves, towards.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(ours, want, strict=True))


@pytest.mark.parametrize("tokens", [1, 100, 777])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 64), (4, 4, 128), (16, 1, 32)])
def test_chunked_in_float32_is_the_oracle(make_case, tokens, heads, kv_heads, dim):
    case = make_case(tokens, heads, kv_heads, dim, torch.float32)
    pairs = zip(case.run(SMALL, "chunked"), case.run(SMALL, "reference"), strict=True)
    assert all((got - want).abs().max() < 1e-3 for got, want in pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_in_half_precision_is_as_good_as_an_eager_run(make_case, dtype):
    case = make_case(2500, dtype=dtype)
    different = (case.blocks(PAPER, "chunked") != case.blocks(PAPER, "reference")).any(-1).float().mean().item()
    assert different < 1e-3  # only scores that differ in the last bits of float32 may swap
    exact = case.to(torch.float64).run(PAPER, "reference")
    eager, actual = case.run(PAPER, "naive"), case.run(PAPER, "chunked")
    for got, other, want in zip(actual, eager, exact, strict=True):
        assert distance(got, want) <= 2 * distance(other, want)


def test_chunked_gives_the_same_bits_twice(make_case):
    case = make_case(5000)
    first, second = (case.run(PAPER, "chunked") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_chunked_does_not_wait_for_the_device(make_case):
    case = make_case(3000)
    case.run(PAPER, "chunked")
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(PAPER, "chunked")
    finally:
        torch.cuda.set_sync_debug_mode("default")
