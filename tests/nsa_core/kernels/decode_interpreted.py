"""The decoding kernels in Triton's interpreter, at small sizes: steps against prefill, choices against the oracle."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from kernel_interpreter import MARKS

from nsa_core import NSAConfig, select_blocks
from nsa_core.cache import DenseCache, NSACache
from nsa_core.layer import DenseAttention, NativeSparseAttention

pytestmark = MARKS
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=10)
# Three strides in a compressed token, six in a block, block sizes that are not powers of two.
ODD = NSAConfig(cmp_block=12, cmp_stride=4, slc_block=24, slc_count=5, init_blocks=2, local_blocks=1, window=21)
LENGTH = 77  # from 70 on a block begins at 72, and strides end at 72 and 76


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def layer_of(config, heads=4, kv_heads=2, dim=8):
    torch.manual_seed(0)
    layer = NativeSparseAttention(24, heads, kv_heads, dim, config, backend={"select": "triton"})
    torch.nn.init.normal_(layer.gate_proj.weight)
    return layer


def exact(layer, x):
    """Output of the oracle for the whole sequence, in float64."""
    twin = NativeSparseAttention(24, layer.heads, layer.kv_heads, layer.head_dim, layer.config, backend="reference")
    twin.load_state_dict(layer.state_dict())
    return twin.double()(x.double())


def in_steps(layer, x, cuts, capacity=None):
    """Output of the layer for x in parts that end at `cuts`, then token by token; and the cache."""
    cache = layer.new_cache(capacity)
    layer.backend = "chunked"  # the prefill's kernels have tests of their own
    outs = [layer(x[:, : cuts[0]], cache)]
    layer.backend = "triton"
    outs += [layer(x[:, a:b], cache) for a, b in pairwise([*cuts, *range(cuts[-1] + 1, x.shape[1] + 1)])]
    return torch.cat(outs, 1), cache


CONFIGS = {
    "mean": SMALL,
    "learned": replace(SMALL, compress="mlp"),
    "no-overlap": replace(SMALL, cmp_stride=8),
    "few-blocks": replace(SMALL, slc_count=2, init_blocks=0, local_blocks=0),
    "window-of-one": replace(SMALL, window=1),
    "odd": ODD,
}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_steps_give_what_prefill_gives(name):
    layer, x = layer_of(CONFIGS[name]), torch.randn(1, LENGTH, 24)
    out, _ = in_steps(layer, x, [70])
    torch.testing.assert_close(out.double(), exact(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("prefill", "tokens"), [(1, 10), (7, 12), (8, 13), (11, 16)])
@torch.no_grad()
def test_a_short_prefill_is_continued(prefill, tokens):
    """Prefills that end before, at and after the first compressed token; steps complete one or two, of every 4."""
    layer, x = layer_of(SMALL), torch.randn(1, tokens, 24)
    out, cache = in_steps(layer, x, [prefill])
    torch.testing.assert_close(out.double(), exact(layer, x), rtol=1e-4, atol=1e-5)
    assert cache.length == int(cache.position) == tokens
    assert cache.k_cmp.length == SMALL.cmp_tokens(tokens)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 16), (16, 1, 32), (6, 1, 24)])
@torch.no_grad()
def test_groups_and_head_dims(heads, kv_heads, dim):
    layer, x = layer_of(SMALL, heads, kv_heads, dim), torch.randn(1, 49, 24)
    out, _ = in_steps(layer, x, [46])
    torch.testing.assert_close(out.double(), exact(layer, x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_float16_is_near_the_oracle():
    layer, x = layer_of(SMALL).half(), torch.randn(1, 60, 24).half()
    layer.config = replace(SMALL, slc_count=8)  # all blocks are selected, so that rounding cannot change the choice
    out, _ = in_steps(layer, x, [58])
    want = exact(layer, x)
    assert (out - want).norm() / want.norm() < 2e-3


@torch.no_grad()
def test_a_cache_with_a_capacity_gives_the_same_bits_and_stays_in_place():
    """Kernels split keys by the cache's room, which is the same for both caches here."""
    layer, x = layer_of(SMALL), torch.randn(2, 64, 24)
    growing, _ = in_steps(layer, x, [62])
    fixed, cache = in_steps(layer, x, [62], capacity=64)
    assert torch.equal(growing, fixed)
    assert cache.k_slc.buffer.shape[1] == 64
    with pytest.raises(ValueError, match="capacity: 64: use at least 65"):
        layer(x[:, :1], cache)


@torch.no_grad()
def test_beyond_the_capacity_nothing_is_overwritten():
    """Replays of a graph may go beyond the capacity, unchecked by the host."""
    from nsa_core.kernels.decode import step

    layer, x = layer_of(SMALL), torch.randn(1, 24, 24)
    _, cache = in_steps(layer, x, [20], capacity=24)
    cache.frequencies = torch.ones(4)
    before = [held.buffer.clone() for held in (cache.k_slc, cache.v_slc, cache.k_win, cache.v_win, cache.k_open)]
    step.take(torch.ones(1, 4, 8), torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 8), cache)
    after = [held.buffer for held in (cache.k_slc, cache.v_slc, cache.k_win, cache.v_win, cache.k_open)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def random_cache(config, tokens, seed=0, heads=4, kv_heads=2, dim=16, value_dim=24):
    """A cache of random tokens, and a query for its last one."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, tokens, kv_heads, d, generator=generator) for d in (dim, value_dim))
    compressed = (torch.randn(2, config.cmp_tokens(tokens), *x.shape[2:], generator=generator) for x in (k, v))
    cache = NSACache(config)
    cache.take((k, k, k), (v, v, v))
    cache.add_compressed(*compressed)
    cache.position -= 1  # stored, not counted yet
    return cache, torch.randn(2, heads, dim, generator=generator)


def chosen_by_kernels(cache, q):
    from nsa_core.kernels.decode import step

    return step.attend(q, torch.zeros(2, 4, 3), cache)[1].view(2, 2, -1)


@pytest.mark.parametrize("config", [SMALL, ODD, replace(SMALL, slc_count=1, local_blocks=0)])
@pytest.mark.parametrize("tokens", [1, 9, 75, 301])
def test_the_choice_is_the_oracles(config, tokens):
    cache, q = random_cache(config, tokens)
    want = select_blocks(q[:, None], cache.k_slc.values(), config, k_cmp=cache.k_cmp.values(), backend="reference")
    assert torch.equal(chosen_by_kernels(cache, q), want[:, 0])


def test_ties_go_to_the_lower_index_in_one_chunk_or_in_many(monkeypatch):
    from nsa_core.kernels.decode import step

    cache, q = random_cache(SMALL, 301)
    cache.k_cmp.buffer.copy_(cache.k_cmp.buffer[:, :1].expand_as(cache.k_cmp.buffer))
    want = select_blocks(q[:, None], cache.k_slc.values(), SMALL, k_cmp=cache.k_cmp.values(), backend="reference")
    assert torch.equal(chosen_by_kernels(cache, q), want[:, 0])
    cache.position -= 1
    monkeypatch.setattr(step, "_chunks", lambda config, room: (3, 16, 16))
    assert torch.equal(chosen_by_kernels(cache, q), want[:, 0])


def test_a_step_reads_neither_unchosen_blocks_nor_beyond_its_tokens():
    from nsa_core.kernels.decode import step

    config = replace(SMALL, slc_count=3)  # one initial and two local blocks: all are forced
    cache, q = random_cache(config, LENGTH)
    gates = torch.randn(2, 4, 3)
    want, _ = step.attend(q, gates, cache)
    cache.position -= 1
    last = (LENGTH - 1) // config.slc_block
    for held in (cache.k_slc, cache.v_slc):
        held.buffer[:, config.slc_block : (last - 1) * config.slc_block] = torch.nan
    for held in (cache.k_slc, cache.v_slc, cache.k_cmp, cache.v_cmp):
        held.buffer[:, held.length :] = torch.nan
    assert torch.equal(step.attend(q, gates, cache)[0], want)


@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 4, 2), (70, 6, 1), (200, 2, 2)])
@torch.no_grad()
def test_dense_steps_give_what_prefill_gives(tokens, heads, kv_heads, monkeypatch):
    monkeypatch.setattr("nsa_core.decode.default", lambda device, dtype, heads: "triton")
    torch.manual_seed(0)
    layer, x = DenseAttention(24, heads, kv_heads, 8), torch.randn(2, tokens + 3, 24)
    for cache in (DenseCache(), DenseCache(tokens + 3)):
        parts = [layer(part, cache) for part in (x[:, :tokens], *x[:, tokens:].split(1, 1))]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-4, atol=1e-5)
        assert int(cache.position) == cache.length == tokens + 3


@torch.no_grad()
def test_the_host_can_count_tokens_stored_by_replays():
    layer, x = layer_of(SMALL), torch.randn(1, 20, 24)
    _, cache = in_steps(layer, x, [18], capacity=24)
    cache.position.fill_(16)
    cache.recount()
    assert cache.length == 16
    assert cache.k_cmp.length == SMALL.cmp_tokens(16)
