"""select_blocks: candidates, forced blocks, order, ties, Eq. 9 and 10, needles; the oracle against scalar loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_core import NSAConfig, nsa_attention, select_blocks
from nsa_core.backends import _common


def by_the_letter(scores, t, config):
    """Selection for one query from its blocks' scores: one statement per sentence of the definition."""
    candidates = [j for j in range(len(scores)) if j * config.slc_block <= t]
    own = t // config.slc_block
    forced = {j for j in candidates if j < config.init_blocks or j > own - config.local_blocks}
    rest = sorted((j for j in candidates if j not in forced), key=lambda j: (-scores[j], j))
    chosen = sorted([*forced, *rest[: config.slc_count - len(forced)]])
    return chosen + [-1] * (config.slc_count - len(chosen))


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 12),
    init=st.integers(0, 2),
    local=st.integers(0, 3),
    free=st.integers(0, 4),
    levels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_choice_follows_the_definition(blocks, init, local, free, levels, seed, dtype):
    config = NSAConfig(8, 4, 16, max(1, init + local + free), init, local)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (2, 5, blocks), generator=generator).to(dtype) / 3  # few levels: many ties
    positions = torch.randint(blocks * config.slc_block, (5,), generator=generator).sort().values
    chosen = _common.choose(scores, positions, config)
    assert chosen.dtype == torch.int32
    for head in range(2):
        for row, t in enumerate(positions.tolist()):
            assert chosen[head, row].tolist() == by_the_letter(scores[head, row].tolist(), t, config)


def overlap(i, j, config):
    token = set(range(i * config.cmp_stride, i * config.cmp_stride + config.cmp_block))
    return len(token & set(range(j * config.slc_block, (j + 1) * config.slc_block)))


@pytest.mark.parametrize("sizes", [(32, 16, 64), (8, 4, 16), (16, 4, 16), (4, 4, 16), (12, 4, 16), (4, 2, 4)])
def test_importance_weighs_tokens_by_their_overlap(sizes):
    config = NSAConfig(*sizes, slc_count=4, init_blocks=1, local_blocks=1)
    tokens, blocks = config.cmp_tokens(5 * config.slc_block + 3), 6
    p = torch.rand(2, 3, 4, tokens, dtype=torch.float64)
    weights = torch.tensor([[overlap(i, j, config) / sizes[1] for j in range(blocks)] for i in range(tokens)])
    expected = torch.einsum("xcgi,ij->xcj", p, weights.double())
    torch.testing.assert_close(_common.importance(p, blocks, config), expected)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 161])
def test_backends_select_the_same(fast_backend, make_case, config, tokens, dtype):
    case = make_case(tokens, heads=6, batch=2, dtype=dtype)
    expected = select_blocks(case.q, case.k, config, backend="reference")
    assert expected.shape == (2, tokens, 2, config.slc_count)
    assert expected.dtype == torch.int32
    assert torch.equal(select_blocks(case.q, case.k, config, backend=fast_backend), expected)


@pytest.mark.usefixtures("many_chunks")
@pytest.mark.parametrize("heads", [2, 10])
def test_ties_go_to_the_lower_index_on_every_backend(backend, config, heads):
    q, k = torch.zeros(1, 200, heads, 16), torch.ones(1, 200, 2, 16)
    last = select_blocks(q, k, config, backend=backend)[0, -1]
    # all interior blocks are equal; block 0 is forced, the last two are local
    assert last.tolist() == [[0, 1, 11, 12]] * 2


def test_equal_queries_in_a_group_select_as_one_of_them(backend, make_case, config):
    case = make_case(120, heads=2, kv_heads=2)
    alone = select_blocks(case.q, case.k, config, backend=backend)
    group = select_blocks(case.q.repeat_interleave(4, 2), case.k, config, backend=backend)
    assert torch.equal(group, alone)


@pytest.mark.parametrize("name", ["naive", "chunked", "packed"])  # gather's selection is naive's
@pytest.mark.parametrize("depth", [0.1, 0.9])
@pytest.mark.parametrize("tokens", [4096, 65536])
def test_a_needles_block_is_selected(tokens, depth, name):
    config = NSAConfig()
    generator = torch.Generator().manual_seed(tokens)
    k, q = torch.randn(1, tokens, 1, 16, generator=generator), torch.randn(1, 4, 2, 16, generator=generator)
    needle = int(depth * tokens)
    k[0, needle - 16 : needle + 16] += 4 * q[0, 0, 0]  # as large as compression has it: half a block long
    q[:] = q[:, :1, :1]
    blocks = select_blocks(q, k, config, backend=name)
    assert (blocks == needle // config.slc_block).any(-1).all()


CONFIGS = [
    NSAConfig(8, 4, 8, 3, init_blocks=1, local_blocks=1, window=5),
    NSAConfig(4, 4, 8, 4, init_blocks=0, local_blocks=0, window=1),
    NSAConfig(12, 4, 16, 3, init_blocks=2, local_blocks=1, window=7),
    NSAConfig(4, 1, 4, 4, init_blocks=0, local_blocks=2, window=3),
]
LENGTH = 41


def attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Output and probabilities of one query over keys [T,D], values [T,D]."""
    p = torch.softmax(keys @ query / len(query) ** 0.5, 0)
    return p @ values, p


def one_query(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, t: int, c: NSAConfig) -> tuple[Tensor, list[int]]:
    """Outputs [G,D] of a group's queries [G,D] at position t, and their selected blocks."""
    starts = [i for i in range(0, t + 1, c.cmp_stride) if i + c.cmp_block - 1 <= t]
    out, scores = torch.zeros_like(q), [0.0] * (t // c.slc_block + 1)
    for head in range(len(q)) if starts else ():
        short_k, short_v = (torch.stack([x[i : i + c.cmp_block].mean(0) for i in starts]) for x in (k, v))
        attended, p = attend(q[head], short_k, short_v)
        out[head] += gates[head, 0] * attended
        for i, share in zip(starts, p.tolist(), strict=True):
            for position in range(i, i + c.cmp_block):  # Eq. 9, token by token
                scores[position // c.slc_block] += share / c.cmp_stride
    blocks = by_the_letter(scores, t, c)
    selected = [s for s in range(t + 1) if s // c.slc_block in blocks]
    recent = list(range(max(0, t - c.window + 1), t + 1))
    for head in range(len(q)):
        for branch, tokens in ((1, selected), (2, recent)):
            out[head] += gates[head, branch] * attend(q[head], k[tokens], v[tokens])[0]
    return out, blocks


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_reference_is_the_definition(config: NSAConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, h, 6, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    gates = torch.rand(1, LENGTH, 4, 3, generator=generator, dtype=torch.float64)
    out, blocks = torch.zeros_like(q), torch.empty(1, LENGTH, 2, config.slc_count, dtype=torch.int32)
    for t in range(LENGTH):
        for head in range(2):
            group = slice(2 * head, 2 * head + 2)
            found, selected = one_query(q[0, t, group], k[0, :, head], v[0, :, head], gates[0, t, group], t, config)
            out[0, t, group] = found
            blocks[0, t, head] = torch.tensor(selected)
    for rows in (LENGTH, 9):  # all queries, and the last ones alone
        last = (q[:, -rows:], k, v, gates[:, -rows:])
        actual = nsa_attention(*last, config, backend="reference")
        torch.testing.assert_close(actual, out[:, -rows:], rtol=1e-10, atol=1e-12)
        assert torch.equal(select_blocks(*last[:2], config, backend="reference"), blocks[:, -rows:])
