"""nsa_attention, compress and dense_attention: every backend against the oracle, and invariants of all."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from nsa_core import (
    NSAConfig,
    compress,
    dense_attention,
    nsa_attention,
    nsa_attn_varlen_func,
    routes,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa_core.backends import _common
from nsa_core.errors import InputError

pytestmark = pytest.mark.usefixtures("many_chunks")


def assert_close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def errors(actual, expected):
    return (actual.double() - expected.double()).abs().max().item()


def test_nothing_before_t_changes_when_later_tokens_do(backend, make_case, config):
    case, t = make_case(150, batch=2), 77
    other = make_case(150, batch=2, seed=1)
    out, blocks = nsa_attention(*case.leaves, config, backend=backend), select_blocks(case.q, case.k, config)
    with torch.no_grad():
        for x, y in zip(case.leaves, other.leaves, strict=True):
            x[:, t:] = 100 * y[:, t:]
    changed = nsa_attention(*case.leaves, config, backend=backend)
    assert torch.equal(out[:, :t], changed[:, :t])
    assert not torch.equal(out[:, t], changed[:, t])
    assert torch.equal(blocks[:, :t], select_blocks(case.q, case.k, config)[:, :t])


def test_three_pairs_of_keys_and_values(fast_backend, make_case, config):
    cases = [make_case(90, seed=seed) for seed in range(3)]
    q, gates = cases[0].q, cases[0].gates
    keys, values = tuple(case.k for case in cases), tuple(case.v for case in cases)
    out = nsa_attention(q, keys, values, gates, config, backend=fast_backend)
    assert_close(out, nsa_attention(q, keys, values, gates, config, backend="reference"))
    k_cmp = compress(keys[0], config)
    alone = [
        nsa_attention(q, k, v, gates, config, k_cmp=k_cmp, branches=(branch,), backend=fast_backend)
        for branch, k, v in zip(("cmp", "slc", "win"), keys, values, strict=True)
    ]
    assert_close(out, sum(alone))


def test_given_compressed_keys_take_the_place_of_the_mean(backend, make_case, config):
    case, other = make_case(90), make_case(90, seed=1)
    k_cmp, v_cmp = compress(case.k, config), compress(case.v, config)
    expected = nsa_attention(*case.leaves, config, backend=backend)
    learned = NSAConfig(**{**vars(config), "compress": "mlp"})
    assert_close(nsa_attention(*case.leaves, learned, k_cmp=k_cmp, v_cmp=v_cmp, backend=backend), expected)
    k = (other.k, case.k, case.k)
    assert_close(nsa_attention(case.q, k, case.v, case.gates, config, k_cmp=k_cmp, backend=backend), expected)


def test_packed_equals_separate(backend, make_case, config):
    lengths = [1, 5, 8, 70, 40]
    case = make_case(sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = [x[0] for x in case.leaves]
    out = nsa_attention(*packed, config, cu_seqlens=bounds, backend=backend)
    blocks = select_blocks(*packed[:2], config, cu_seqlens=bounds, backend=backend)
    attend = partial(selected_attention, block_size=config.slc_block, backend=backend)
    of_blocks = attend(*packed[:3], blocks, cu_seqlens=bounds)
    dense = dense_attention(*packed[:3], cu_seqlens=bounds)
    means = compress(packed[1], config, cu_seqlens=bounds)
    given = nsa_attention(*packed, config, cu_seqlens=bounds, k_cmp=means, backend=backend)
    singles = [[x[:, a:b] for x in case.leaves] for a, b in pairwise(bounds.tolist())]
    assert torch.equal(out, torch.cat([nsa_attention(*one, config, backend=backend)[0] for one in singles]))
    assert torch.equal(given, out)
    chosen = [select_blocks(*one[:2], config, backend=backend) for one in singles]
    assert torch.equal(blocks, torch.cat(chosen, 1)[0])
    alone = [attend(*one[:3], each) for one, each in zip(singles, chosen, strict=True)]
    assert torch.equal(of_blocks, torch.cat(alone, 1)[0])
    assert torch.equal(dense, torch.cat([dense_attention(*one[:3])[0] for one in singles]))
    assert torch.equal(means, torch.cat([compress(one[1], config)[0] for one in singles]))


def test_packed_sequences_may_be_empty(backend, make_case, config):
    case = make_case(110)
    packed = [x[0].detach().requires_grad_() for x in case.leaves]
    means = compress(packed[1], config, cu_seqlens=torch.tensor([0, 70, 110]))
    results = []
    for bounds in ([0, 70, 110], [0, 0, 70, 70, 70, 110, 110]):
        options = {"cu_seqlens": torch.tensor(bounds), "max_seqlen": 70, "backend": backend}
        out = nsa_attention(*packed, config, k_cmp=means, **options)
        blocks = select_blocks(*packed[:2], config, **options)
        dense = dense_attention(*packed[:3], cu_seqlens=options["cu_seqlens"])
        assert torch.equal(compress(packed[1], config, cu_seqlens=options["cu_seqlens"]), means)
        results.append((out, *torch.autograd.grad(out.square().sum(), packed, retain_graph=True), blocks, dense))
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(("batch", "rows", "tokens"), [(0, 20, 20), (2, 0, 0), (2, 0, 20)])
def test_no_query_has_an_empty_result_and_gradients_of_zero(backend, config, batch, rows, tokens):
    """As of PyTorch's operators, for a batch's last rank; packed ones, too."""
    shapes = (rows, 4, 16), (tokens, 2, 16), (tokens, 2, 24), (rows, 4, 3)
    leaves = [torch.randn(batch, *shape, requires_grad=True) for shape in shapes]
    calls = [(leaves, {})]
    if batch == 0:
        packed = [torch.randn(0, *shape[1:], requires_grad=True) for shape in shapes]
        calls += [(packed, {"cu_seqlens": torch.tensor([0, 0])} | more) for more in ({}, {"max_seqlen": 8})]
    for given, options in calls:
        out = nsa_attention(*given, config, backend=backend, **options)
        dense = dense_attention(*given[:3], cu_seqlens=options.get("cu_seqlens"))
        blocks = select_blocks(*given[:2], config, backend=backend, **options)
        assert out.shape == dense.shape == (*given[0].shape[:-1], 24)
        assert blocks.shape == (*given[0].shape[:-2], 2, config.slc_count)
        for x, grad in zip(given, torch.autograd.grad(out.sum() + dense.sum(), given), strict=True):
            assert torch.equal(grad, torch.zeros_like(x))
    assert compress(leaves[1], config).shape == (batch, config.cmp_tokens(tokens), 2, 16)


@pytest.mark.parametrize(
    ("bounds", "longest", "message"),
    [
        ([0, 30, 40], 29, "max_seqlen: 29: use the length of the longest sequence: 30"),
        ([0, 30, 40], 0, "max_seqlen: 0: use the length"),
        ([0, 30, 40], 30.0, "max_seqlen: 30.0: use the length"),
        ([0, 40, 30], 40, "cu_seqlens: "),
    ],
)
def test_impossible_bounds_or_max_seqlen_are_refused(make_case, config, bounds, longest, message):
    packed, given = [x[0] for x in make_case(40).leaves], torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(InputError, match=f"^{message}"):
        nsa_attention(*packed, config, cu_seqlens=given, max_seqlen=longest)
    with pytest.raises(InputError, match=f"^{message}"):
        select_blocks(*packed[:2], config, cu_seqlens=given, max_seqlen=longest)


@pytest.mark.parametrize("rows", [110, 60])
def test_blocks_and_window_of_the_callers_choice_are_attended(backend, make_case, rows):
    """Any blocks, also without the own one, against a mask; gradients, too."""
    case, own = make_case(110, rows=rows), torch.arange(110 - rows, 110)
    config = NSAConfig(8, 8, 8, 3, init_blocks=0, local_blocks=0)
    blocks = _common.choose(torch.rand(2, rows, 14), own, config)  # [Hkv,S,n]
    tokens = torch.arange(110)
    seen = (blocks[..., None] == tokens // 8).any(-2) & (tokens <= own[:, None])
    k, v = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (case.k, case.v))
    mask = seen.repeat_interleave(2, 0)
    want = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(1, 2), k, v, mask).transpose(1, 2)
    blocks = blocks.transpose(0, 1)[None]
    got = selected_attention(*case.leaves[:3], blocks, block_size=8, backend=backend)
    assert_close(got, want)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), case.leaves[:3]) for out in (got, want)), strict=True):
        assert_close(x, y, 1e-4)
    assert_close(window_attention(*case.leaves[:3], 9, backend=backend), dense_attention(*case.leaves[:3], window=9))


def test_blocks_that_are_no_choice_are_refused(make_case):
    q, k, v, _ = make_case(40).leaves
    blocks = select_blocks(q, k, NSAConfig(8, 8, 8, 2, 0, 0))
    for row, wrong in (
        (39, (1, 1)),
        (39, (2, 1)),
        (39, (3, -1)),
        (39, (0, 5)),
        (39, (-1, 2)),
        (3, (0, 1)),
        (9, (1, -1)),
    ):
        given = blocks.clone()
        given[0, row, 1] = torch.tensor(wrong)
        with pytest.raises(InputError, match=r"^blocks: .*: give 2 ascending blocks at or before each query's own"):
            selected_attention(q, k, v, given, block_size=8)
    for given in (blocks.long(), blocks[:, :, :1], blocks[0]):
        with pytest.raises(InputError, match=r"^blocks: .*: give .*int32"):
            selected_attention(q, k, v, given, block_size=8)


def test_packed_attention_by_flash_attns_names(make_case, config):
    leaves, bounds = [x[0] for x in make_case(40).leaves], torch.tensor([0, 30, 40], dtype=torch.int32)
    want = nsa_attention(*leaves, config, cu_seqlens=bounds, max_seqlen=30, scale=0.5)
    got = nsa_attn_varlen_func(*leaves, bounds, bounds, 30, 30, 0.5, config=config)
    assert torch.equal(got, want)
    with pytest.raises(InputError, match=r"^cu_seqlens_k: \[3\]: give that of q itself"):
        nsa_attn_varlen_func(*leaves, bounds, torch.tensor([0, 20, 40], dtype=torch.int32))
    with pytest.raises(InputError, match=r"^causal: False: use True"):
        nsa_attn_varlen_func(*leaves, bounds, causal=False)


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_fewer_queries_than_keys_are_the_last_positions(backend, make_case, config, rows):
    case = make_case(120)
    last = [case.q[:, -rows:], case.k, case.v, case.gates[:, -rows:]]
    assert_close(nsa_attention(*last, config, backend=backend), nsa_attention(*case.leaves, config)[:, -rows:])
    assert_close(dense_attention(*last[:3]), dense_attention(*case.leaves[:3])[:, -rows:])
    assert_close(dense_attention(*last[:3], window=9), dense_attention(*case.leaves[:3], window=9)[:, -rows:])


@pytest.mark.parametrize("sizes", [{}, {"cmp_block": 1, "cmp_stride": 1, "slc_block": 1}], ids=["blocks", "tokens"])
def test_non_contiguous_operands(backend, make_case, config, sizes):
    case, config = make_case(90, heads=4, kv_heads=4), NSAConfig(**vars(config) | sizes)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in case.leaves]
    joint = torch.stack([case.q, case.k, case.v], 2).detach()
    expected = nsa_attention(*case.leaves, config, backend=backend)
    assert not strided[0].is_contiguous()
    assert_close(nsa_attention(*strided, config, backend=backend), expected)
    assert_close(nsa_attention(*joint.unbind(2), case.gates, config, backend=backend), expected)


@pytest.mark.parametrize("branch", ["cmp", "slc", "win"])
def test_a_forced_branch_executes_only_itself(backend, make_case, config, branch):
    case = make_case(90)
    with routes.capture() as runs:
        nsa_attention(*case.leaves, config, branches=(branch,), backend=backend)
    expected = {branch, "select"} if branch == "slc" else {branch}
    assert {run.branch for run in runs} == expected
    assert {run.kernel for run in runs} == {backend}


def test_a_backend_for_each_branch(make_case, config):
    case = make_case(90)
    mixed = {"cmp": "naive", "win": "reference", "select": "naive"}
    with routes.capture() as outer, routes.capture() as runs:
        out = nsa_attention(*case.leaves, config, backend=mixed)
    assert outer == runs
    assert {(run.branch, run.kernel) for run in runs} == {*mixed.items(), ("slc", "chunked")}
    assert_close(out, nsa_attention(*case.leaves, config, backend="reference"))


def test_compress_is_the_mean_of_each_block(make_case):
    config = NSAConfig(cmp_block=12, cmp_stride=4, slc_block=16)
    x = make_case(43, batch=2).k
    expected = torch.stack([x[:, i * 4 : i * 4 + 12].mean(1) for i in range(config.cmp_tokens(43))], 1)
    assert_close(compress(x, config), expected, 1e-6)
    assert compress(x[:, :11], config).shape == (2, 0, 2, 16)


def test_autocast_takes_its_dtype(make_case, config):
    case = make_case(90)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nsa_attention(*case.leaves, config)
    assert out.dtype == torch.bfloat16
    gradient = torch.autograd.grad(out.float().sum(), case.q)[0]
    assert gradient.dtype == torch.float32
    assert errors(out, nsa_attention(*case.leaves, config, backend="reference")) < 0.05


def test_what_is_left_out_or_means_nothing_is_refused(make_case, config):
    q, k, v, gates = (x.detach() for x in make_case(8).leaves[:4])
    with pytest.raises(InputError, match=r"^gates: None: give a tensor"):
        nsa_attention(q, k, v, None, config)
    with pytest.raises(InputError, match=r"^max_seqlen: 40: give it with cu_seqlens"):
        nsa_attention(q, k, v, gates, config, max_seqlen=40)
