"""The Triton kernels in Triton's interpreter, at small sizes: values, gradients and selection against the oracle."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_interpreter import MARKS, SMALL, config, interpreted, run
from torch.autograd import forward_ad

from nsa_core import NSAConfig, available_backends, nsa_attention, routes, select_blocks, selected_attention
from nsa_core.backends import _common
from nsa_core.errors import BackendError, InputError
from nsa_core.functional import compress

__all__ = ["config", "interpreted"]  # fixtures

pytestmark = MARKS
OTHERS = {
    "no tile's multiples": NSAConfig(12, 4, 24, slc_count=5, init_blocks=2, local_blocks=1, window=21),
    "a window within the local blocks": NSAConfig(**SMALL),
    "no forced blocks": NSAConfig(**SMALL, init_blocks=0, local_blocks=0),
    "no free blocks": NSAConfig(**SMALL, init_blocks=2),
    "no overlap, one block of all": NSAConfig(8, 8, 8, slc_count=1, init_blocks=0, local_blocks=0, window=1),
    "blocks of 64": NSAConfig(16, 4, 64, slc_count=1, init_blocks=0, local_blocks=1, window=200),
    "a window just as wide as the local blocks": NSAConfig(8, 4, 16, slc_count=5, window=32),
    "a window over the initial blocks": NSAConfig(8, 4, 8, slc_count=6, init_blocks=2, window=61),
    "no local blocks and a wide window": NSAConfig(8, 4, 16, slc_count=3, local_blocks=0, window=40),
    "the widest window of 32 bits": NSAConfig(**SMALL | {"window": 2**31 - 1}),
}


def distances(case, config, dtype=torch.float64, **options):
    """Relative distances of output and gradients from the oracle; infinite instead of NaN, which max() would lose."""
    pairs = zip(
        run(case.leaves, config, "triton", **options),
        run(case.to(dtype).leaves, config, "reference", **options),
        strict=True,
    )
    found = [(got.double() - want.double()).norm() / want.double().norm() for got, want in pairs]
    return [x.nan_to_num(torch.inf).item() for x in found]


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "value_dim", "batch"),
    [
        (1, 2, 1, 16, 16, 1),
        (75, 6, 2, 16, 16, 2),
        (100, 3, 1, 24, 40, 1),
        (33, 24, 1, 16, 16, 1),  # a tile has as many rows as a group has heads, or the next power of two
        (60, 128, 1, 16, 16, 1),
    ],
)
def test_values_and_gradients(make_case, config, tokens, heads, kv_heads, dim, value_dim, batch):
    case = make_case(tokens, heads, kv_heads, dim, value_dim, batch)
    got = run(case.leaves, config, "triton")
    for ours, exact in zip(got, run(case.to(torch.float64).leaves, config, "reference"), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_sizes(make_case, name):
    assert max(distances(make_case(90, 3, 1), OTHERS[name])) < 1e-6


def test_a_chosen_block_is_seen_up_to_the_query(make_case):
    """Queries and keys turn with their position, so that a query's own block, which is not over, is among the best."""
    rows = 50
    case, config = make_case(125, 2, 1, rows=rows), OTHERS["no forced blocks"]
    angle = torch.arange(125)[:, None] / 20
    towards = 6 * torch.cat([angle.cos(), angle.sin()], 1)[:, None]
    with torch.no_grad():
        case.q[..., :2] += towards[-rows:]
        case.k[..., :2] += towards
    own = torch.arange(125)[-rows:, None, None] // config.slc_block
    assert (select_blocks(case.q, case.k, config, backend="triton") == own).any(-1)[:, -40:].float().mean() > 0.6
    assert max(distances(case, config)) < 1e-5  # scores of 36 round more than those of others


@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(8, 40, 24), (1, 136, 24)])
def test_float16_is_near_the_oracle(make_case, config, heads, dim, value_dim):
    """float16 rounds at 2^-11; bfloat16 products are wrong in the interpreter and tested on a device."""
    assert max(distances(make_case(100, heads, 1, dim, value_dim, dtype=torch.float16), config)) < 1e-3


@pytest.mark.parametrize("branches", [("cmp", "slc", "win"), ("slc", "win"), ("cmp", "slc"), ("win",)], ids=",".join)
def test_a_forward_without_gradients_gives_the_same_bits(make_case, config, branches):
    from nsa_core.kernels.runtime.launch import observe

    case = make_case(100, 4, 2, dtype=torch.float16)
    kept = nsa_attention(*case.leaves, config, backend="triton", branches=branches)
    with torch.no_grad(), observe() as started:
        assert torch.equal(nsa_attention(*case.leaves, config, backend="triton", branches=branches), kept)
    merges = [one.constants for one in started if one.kernel == "_merge"]
    assert merges
    assert not any(one["KEEPS"] for one in merges)


def test_a_derivative_forward_is_refused_where_nothing_is_kept_too(make_case, config):
    """Else the derivative would silently be missing, as if it were zero."""
    q, *others = (x.detach() for x in make_case(40).leaves)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
        nsa_attention(forward_ad.make_dual(q, torch.ones_like(q)), *others, config, backend="triton")


@pytest.fixture
def on_hopper(monkeypatch):
    """Choices for Hopper: tiles, operands in registers and, at head dim 128, the way to dq and late rescaling."""
    from nsa_core.kernels.selected import kernels as selected
    from nsa_core.kernels.span import backward_kv, backward_q, forward

    for module in (selected, forward, backward_q, backward_kv):
        monkeypatch.setattr(module, "arch", lambda x: 90)


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 128)])
@pytest.mark.usefixtures("on_hopper")
def test_the_choices_for_hopper_are_near_the_oracle(make_case, config, heads, dim):
    assert max(distances(make_case(100, heads, 1, dim, dtype=torch.float16, batch=2), config)) < 1e-3


@pytest.mark.parametrize("growth", [0.2, 1.0, -1.0])
@pytest.mark.usefixtures("on_hopper")
@torch.no_grad()
def test_sums_rescaled_late_of_scores_that_grow(make_case, config, growth):
    """Scores grow by 3 or 16 nats a block of keys, or fall: sums are rescaled sometimes, always or never.

    Only the output is checked: gradients round more, by the mean of k.
    """
    from nsa_core.kernels.runtime.launch import observe

    case = make_case(100, 2, 1, 128, dtype=torch.float16)
    case.q[..., 0] = 128**0.5
    case.k[..., 0] = growth * torch.arange(100)[:, None]
    with observe() as started:
        got = nsa_attention(*case.leaves, config, backend="triton")
    want = nsa_attention(*case.to(torch.float64).leaves, config, backend="reference")
    assert (got - want).norm() < 5e-4 * want.norm()
    late = [one.constants["LATE"] > 0 for one in started if one.kernel == "_span_forward"]
    assert late
    assert all(late)


def test_what_is_no_number_stays_in_its_packed_sequence(make_case):
    """In the longest and in the shorter one; a third has no block at all."""
    config = NSAConfig(8, 4, 8, slc_count=4, local_blocks=1, window=12)  # from 32 tokens on there are blocks to choose
    leaves = [x[0].detach() for x in make_case(82, 2, 1).leaves]
    options = {"cu_seqlens": torch.tensor([0, 40, 78, 82, 82]), "max_seqlen": 40}
    sound = run([x.clone().requires_grad_() for x in leaves], config, "triton", **options)
    for value, start, end, token in ((math.nan, 0, 40, 5), (math.inf, 40, 78, 75)):
        given = [x.clone() for x in leaves]
        for x in given[:3]:
            x[token] = value
        got = run([x.requires_grad_() for x in given], config, "triton", **options)
        for ours, want in zip(got, sound, strict=True):
            assert not ours[start:end].isfinite().all()
            assert torch.equal(ours[:start], want[:start])
            assert torch.equal(ours[end:], want[end:])


def test_queries_in_chunks_change_nothing(make_case, config, monkeypatch):
    from nsa_core.kernels import scores
    from nsa_core.kernels.runtime import replay
    from nsa_core.kernels.selected import inverse

    case = make_case(76, 2, 2, batch=2)
    whole = run(case.leaves, config, "triton")
    monkeypatch.setattr(scores, "_BUFFER", 37 * 4 * 4 * 4)
    for rows in (8, 20):  # of 12 a sequence and kv head: within one, and beyond one
        monkeypatch.setattr(inverse, "slot_rows", lambda q, kv_heads, dim, free, rows=rows: rows)
        replay.kept.cache_clear()
        for x, y in zip(whole, run(case.leaves, config, "triton"), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_call_that_is_replayed_gives_what_is_computed(make_case, config, monkeypatch):
    from nsa_core.kernels import attention

    cases = [make_case(70, 2, 1, seed=seed) for seed in range(2)]
    computed = [run(case.leaves, config, "triton") for case in cases]  # the second call is captured
    monkeypatch.delattr(attention, "forward")
    monkeypatch.delattr(attention, "backward")
    replayed = [run(case.leaves, config, "triton") for case in cases]
    for one, other in zip(computed, replayed, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_a_forced_branch_computes_only_itself(make_case, config, branch):
    case = make_case(80, 2, 1)
    with routes.capture() as runs:
        out = nsa_attention(*case.leaves, config, backend="triton", branches=(branch,))
    expected = {branch, "select"} if branch == "slc" else {branch}
    assert {one.branch for one in runs} == expected
    assert {one.kernel for one in runs} == {"triton"}
    torch.testing.assert_close(out, nsa_attention(*case.leaves, config, backend="reference", branches=(branch,)))


def test_gates_of_zero_give_no_gradient_and_no_nan(make_case, config):
    case = make_case(80, 2, 1)
    with torch.no_grad():
        case.gates[..., 0], case.gates[:, ::2, :, 1], case.gates[..., 2] = 0, 0, 1
    got, exact = run(case.leaves, config, "triton"), run(case.to(torch.float64).leaves, config, "reference")
    for ours, want in zip(got, exact, strict=True):
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["triton", {"cmp": "triton"}], ids=str)
def test_gates_below_zero_are_refused_before_their_gradients_are_nan(make_case, config, backend):
    case = make_case(80, 2, 1)
    with torch.no_grad():
        case.gates[0, 5, 1, 0] = -0.5
        out = nsa_attention(*case.leaves, config, backend=backend)
        torch.testing.assert_close(out, nsa_attention(*case.leaves, config, backend="reference"))
    with pytest.raises(InputError, match=r"^gates: -0\.5: give gates of 0 or more, .* or use backend=\"chunked\""):
        nsa_attention(*case.leaves, config, backend=backend)


@pytest.mark.parametrize("way", [0, 1, 2])
def test_no_finite_gradient_is_wrong_for_a_gate_below_zero(make_case, config, way):
    """Nor where the other gates are 0. Of the kernels alone: on a GPU nothing refuses such gates."""
    from nsa_core.kernels import operators

    case = make_case(80, 2, 1)
    with torch.no_grad():
        case.gates[0, 20, 0] = 0
        case.gates[0, 20, 0, way] = case.gates[0, 75, 1, way] = -0.5
    below = (case.gates < 0).any(-1)
    call, pair = operators.Call(config, ("cmp", "slc", "win"), 0, 0.25, compresses=True), (case.k, case.v)
    out = operators.attend(case.q, case.gates, None, [pair, pair], call)
    towards = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) * below[..., None]
    got = torch.autograd.grad(out, case.leaves, towards)
    exact = case.to(torch.float64)
    want = nsa_attention(*exact.leaves, config, backend="reference")
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    for x, y in zip(got, torch.autograd.grad(want, exact.leaves, towards.double()), strict=True):
        finite = x.isfinite()
        torch.testing.assert_close(x[finite].double(), y[finite], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[0].isnan(), below[..., None].expand_as(got[0]))


@pytest.mark.parametrize("count", [4, 7])
def test_ties_go_to_the_lower_index(make_case, config, monkeypatch, count):
    """Equal keys make all blocks away from the ends equally important; of count, all but three are chosen freely.

    In tiles of 16: of larger ones, numpy's products instead of the device's give equal columns different bits.
    """
    from nsa_core.kernels import scores

    monkeypatch.setattr(scores, "_importance_tile", lambda q: scores.Tile(16, 16))
    case, config = make_case(150, 2, 1), replace(config, slc_count=count)
    k = case.k[:, :1].expand_as(case.k)
    ours = select_blocks(case.q, k, config, backend="triton")
    assert torch.equal(ours, select_blocks(case.q, k, config, backend="reference"))


@pytest.mark.parametrize("tokens", [300, 700, 1500, 8200])
def test_more_blocks_than_groups(make_case, tokens):
    """Groups of the choice have a run of 4 blocks, of 8 beyond 128 blocks, several beyond 256, and 64 beyond 1,024."""
    config = NSAConfig(cmp_block=4, cmp_stride=2, slc_block=4, slc_count=16, window=8)
    case = make_case(tokens, 1, 1, rows=12)
    ours = select_blocks(case.q, case.k, config, backend="triton")
    assert torch.equal(ours, select_blocks(case.q, case.k, config, backend="chunked"))


def test_it_says_why_it_cannot_run(monkeypatch):
    assert available_backends(torch.device("cpu"), torch.float32)["triton"] is None
    assert "float64" in str(available_backends(torch.device("cpu"), torch.float64)["triton"])
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in str(available_backends(torch.device("cpu"), torch.float32)["triton"])


def test_more_sequences_of_last_rows_than_one_launch_has_room_for_are_refused(make_case, config):
    """Whole sequences are packed instead (tests/gpu/test_packed_cuda.py)."""
    q, k, v, gates = make_case(2, 2, 2, batch=32_768).leaves
    with pytest.raises(
        BackendError, match=r"32768 sequences of 2 kv heads are 65536; it takes 65535 at once, use fewer"
    ):
        nsa_attention(q[:, 1:], k, v, gates[:, 1:], config, backend="triton")


def test_heads_that_no_tile_holds_are_refused(make_case, config):
    with pytest.raises(
        BackendError, match=r"^backend: 'triton': its tiles hold head dims up to 256 there, not 264; use"
    ):
        nsa_attention(*make_case(20, 1, 1, 264, 16).leaves, config, backend="triton")
    case = make_case(20, 129, 1, 64, 16)
    said = r"^backend: 'triton': its tiles hold up to 128 query heads of a kv head there, not 129; "
    with pytest.raises(BackendError, match=said + 'use backend="chunked"$'):
        nsa_attention(*case.leaves, config, backend="triton")
    with pytest.raises(BackendError, match="not 129"):
        select_blocks(case.q, case.k, config, backend="triton")
    case = make_case(20, 65, 1, 128, 16)
    with pytest.raises(BackendError, match=r'up to 64 .*, not 65; use backend="chunked", or half precision$'):
        nsa_attention(*case.leaves, config, backend="triton")


@pytest.mark.parametrize("shared", [True, False])
def test_packed_sequences_are_computed_as_they_are(make_case, config, shared):
    """Blocks, gradients and all, of empty and short ones, too; compressed tokens may be the caller's."""
    lengths = [3, 90, 0, 70, 1, 33]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    case = make_case(sum(lengths), 4, 2)
    q, k, v, gates = leaves = [x.detach()[0].requires_grad_() for x in case.leaves]
    chosen = [select_blocks(q, k, config, cu_seqlens=cu, backend=backend) for backend in ("triton", "chunked")]
    assert torch.equal(*chosen)

    def results(backend):
        keys, values, made = (k, v, {}) if shared else ((k, 2 * k, 3 * k), (v, 2 * v, 3 * v), {})
        if not shared:
            made = {name: compress(x, config, cu_seqlens=cu) for name, x in (("k_cmp", k), ("v_cmp", v))}
        out = nsa_attention(q, keys, values, gates, config, cu_seqlens=cu, backend=backend, **made)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out, *torch.autograd.grad(out, leaves, weights)]

    for ours, want in zip(results("triton"), results("chunked"), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bounds", [None, [0, 40, 110]])
def test_blocks_of_the_callers_choice_are_attended(make_case, bounds):
    case, config = make_case(110, 4, 2), NSAConfig(16, 16, 16, 3, init_blocks=0, local_blocks=0)
    leaves, options = case.leaves[:3], {"block_size": 16}
    lengths = [110] if bounds is None else [40, 70]
    chosen = [_common.choose(torch.rand(2, n, -(-n // 16)), torch.arange(n), config) for n in lengths]
    blocks = torch.cat(chosen, 1).transpose(0, 1)[None]
    if bounds is not None:
        leaves, blocks, options["cu_seqlens"] = [x[0] for x in leaves], blocks[0], torch.tensor(bounds)
    results = []
    for backend in ("triton", "naive"):
        out = selected_attention(*leaves, blocks, backend=backend, **options)
        results.append([out, *torch.autograd.grad(out.square().sum(), case.leaves[:3])])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
