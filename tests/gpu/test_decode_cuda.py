"""Decoding on a CUDA device: steps against prefill and plain PyTorch, graphs, determinism, a needle, what is read."""

import pytest
import torch

from nsa_core import NSAConfig
from nsa_core.cache import NSACache
from nsa_core.decode import nsa_step
from nsa_core.layer import DenseAttention, NativeSparseAttention
from nsa_core.model import ModelConfig, NSATransformer
from nsa_core.rope import rotate
from nsa_core.routes import capture

PAPER = NSAConfig()
SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def distance(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def random(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def filled(config, batch, tokens, kv_heads, dim, value_dim, dtype, capacity=None):
    """A cache of random tokens."""
    cache = NSACache(config, capacity)
    k, v = (random(batch, tokens, kv_heads, d, dtype=dtype, seed=d) for d in (dim, value_dim))
    cache.take((k, k, k), (v, v, v))
    cache.add_compressed(k[:, : config.cmp_tokens(tokens)], v[:, : config.cmp_tokens(tokens)])
    return cache


def token(batch, heads, kv_heads, dim, value_dim, dtype, seed=7):
    """Query, keys, values and gates of one new token."""
    shapes = (heads, dim), (3, kv_heads, dim), (3, kv_heads, value_dim), (heads, 3)
    return [random(batch, 1, *shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]


def no_compression(k, v, position):
    return k[:, :0], v[:, :0]


def step(given, cache, backend="triton"):
    return nsa_step(*given, cache, theta=10_000.0, compress=no_compression, backend=backend)


def layer_of(config, dtype, heads=12, kv_heads=2, dim=64, backend="triton"):
    torch.manual_seed(0)
    layer = NativeSparseAttention(128, heads, kv_heads, dim, config, backend=backend).cuda()
    torch.nn.init.normal_(layer.gate_proj.weight)
    return layer.to(dtype)


def in_steps(step, x):
    """Output for x [B,S,..] token by token, each contiguous as in a graph's slot: strides may change rounding."""
    return torch.cat([step(part.contiguous()) for part in x.split(1, 1)], 1)


def replayed(step, x):
    """Output for x [B,S,..] token by token: one eager step, then replays of one step's graph."""
    slot = x[:, :1].clone()
    first = step(slot)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(slot)
    outs = [first]
    for part in x[:, 1:].split(1, 1):
        slot.copy_(part)
        graph.replay()
        outs.append(captured.clone())
    return torch.cat(outs, 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "dtype", "bound"),
    [
        (12, 2, 64, 64, BF16, 2e-2),
        (4, 4, 128, 128, BF16, 2e-2),
        (32, 2, 128, 128, FP16, 3e-3),
        (6, 2, 96, 64, FP16, 3e-3),
        (3, 1, 192, 128, BF16, 2e-2),
        (4, 2, 256, 256, FP16, 3e-3),
        (16, 1, 32, 32, FP32, 1e-5),
        (8, 2, 256, 256, FP32, 1e-5),
    ],
)
@pytest.mark.parametrize("tokens", [1, 40, 777])  # all blocks are selected: rounding cannot change the choice
@torch.no_grad()
def test_a_step_agrees_with_plain_float64(tokens, heads, kv_heads, dim, value_dim, dtype, bound):
    ours = filled(PAPER, 2, tokens, kv_heads, dim, value_dim, dtype)
    exact = filled(PAPER, 2, tokens, kv_heads, dim, value_dim, dtype)
    for name in ("k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "k_open", "v_open"):
        held = getattr(exact, name)
        held.buffer = held.buffer.double()
    given = token(2, heads, kv_heads, dim, value_dim, dtype)
    want = step([x.double() for x in given], exact, "chunked")
    assert distance(step(given, ours), want) < bound
    assert distance(ours.k_slc.values(), exact.k_slc.values()) < bound


@pytest.mark.parametrize("compress", ["mean", "mlp"])
@torch.no_grad()
def test_steps_give_what_prefill_gives(compress):
    config = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, window=24, compress=compress)
    layer, x = layer_of(config, FP32), random(2, 700, 128, dtype=FP32)
    want = layer(x)
    cache = layer.new_cache()
    outs = [layer(x[:, :310], cache), layer(x[:, 310:600], cache)]
    with capture() as runs:
        outs += [layer(part, cache) for part in x[:, 600:].split(1, 1)]
    assert {run.kernel for run in runs} == {"decode-triton"}
    assert distance(torch.cat(outs, 1), want) < 1e-4


@torch.no_grad()
def test_half_precision_steps_are_near_prefill():
    layer, x = layer_of(PAPER, BF16), random(2, 1000, 128, dtype=BF16)
    exact = layer_of(PAPER, BF16, backend="reference").double()(x.double())
    cache = layer.new_cache()
    outs = torch.cat([layer(part, cache) for part in (x[:, :700], x[:, 700:900], *x[:, 900:].split(1, 1))], 1)
    for rows in (slice(700, 900), slice(900, None)):
        assert distance(outs[:, rows], exact[:, rows]) <= 2 * distance(layer(x)[:, rows], exact[:, rows])


@pytest.mark.parametrize("compress", ["mean", "mlp"])
@torch.no_grad()
def test_a_graphs_replays_are_eager_steps(compress):
    config = NSAConfig(compress=compress)
    layer, x = layer_of(config, BF16), random(3, 1550, 128, dtype=BF16)
    caches = [layer.new_cache(1600), layer.new_cache(1600)]
    for cache in caches:
        layer(x[:, :1300], cache)
    eager = in_steps(lambda x: layer(x, caches[0]), x[:, 1300:1500])
    assert torch.equal(replayed(lambda x: layer(x, caches[1]), x[:, 1300:1500]), eager)
    caches[1].recount()
    assert caches[1].length == 1500
    assert caches[1].k_cmp.length == config.cmp_tokens(1500)
    prefills = [layer(x[:, 1500:], cache) for cache in caches]
    assert torch.equal(*prefills), "behind tokens that a graph stored, too"


@torch.no_grad()
def test_dense_steps_are_prefill_and_replay():
    torch.manual_seed(0)
    layer, x = DenseAttention(128, 12, 2, 64).cuda().to(BF16), random(2, 1100, 128, dtype=BF16)
    caches = [layer.new_cache(1100), layer.new_cache(1100)]
    for cache in caches:
        layer(x[:, :1000], cache)
    with capture() as runs:
        eager = in_steps(lambda x: layer(x, caches[0]), x[:, 1000:])
    assert {run.kernel for run in runs} == {"decode-triton"}
    assert distance(eager, layer(x)[:, 1000:]) < 1e-2
    assert torch.equal(replayed(lambda x: layer(x, caches[1]), x[:, 1000:]), eager)


@torch.no_grad()
def test_a_whole_model_is_captured():
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=64, dim=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_dim=64, nsa=SMALL)
    model = NSATransformer(config).cuda().to(BF16)
    tokens = torch.randint(64, (2, 200), device="cuda")
    caches = [model.new_cache(256), model.new_cache(256)]
    for cache in caches:
        model(tokens[:, :150], cache=cache)
    eager = in_steps(lambda x: model(x, cache=caches[0]), tokens[:, 150:])
    assert torch.equal(replayed(lambda x: model(x, cache=caches[1]), tokens[:, 150:]), eager)


@torch.no_grad()
def test_a_graph_of_a_growing_cache_is_refused():
    layer, x = layer_of(SMALL, BF16), random(1, 40, 128, dtype=BF16)
    cache = layer.new_cache()
    layer(x[:, :30], cache)
    layer(x[:, 30:31], cache)
    with (
        pytest.raises(ValueError, match="capacity: None: a CUDA graph needs"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(x[:, 31:32], cache)


@torch.no_grad()
def test_the_same_step_gives_the_same_bits_and_nothing_waits():
    given = token(8, 12, 2, 64, 64, BF16)
    outs = []
    for _ in range(3):
        cache = filled(PAPER, 8, 20_000, 2, 64, 64, BF16, capacity=20_480)
        step(given, cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            outs.append(step(given, cache))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@torch.no_grad()
def test_a_needle_is_found_far_away():
    """At 64K tokens the needle's compressed token makes the query choose its block, and the output is its value."""
    cache = filled(PAPER, 2, 65_535, 2, 64, 64, BF16)
    q, k, v, gates = token(2, 12, 2, 64, 64, BF16)
    q = q[:, :, :1].expand_as(q).contiguous()
    position = torch.tensor(65_535.0, device="cuda") * cache_frequencies()
    needle = 4 * rotate(q, position.cos()[None, None], position.sin()[None, None])[:, 0, :2]
    gates[...] = torch.tensor([-30.0, 30.0, -30.0], dtype=BF16, device="cuda")
    at = 20_000 // 64 * 64
    cache.k_cmp.buffer[:, at // 16] = needle
    cache.k_slc.buffer[:, at : at + 32] = needle[:, None]
    cache.v_slc.buffer[:, at : at + 32] = 3.0
    assert (step((q, k, v, gates), cache) - 3.0).abs().max() < 0.05


def cache_frequencies():
    from nsa_core.rope import frequencies

    return frequencies(64, 10_000.0, torch.device("cuda"))


@torch.no_grad()
def test_a_step_reads_neither_unchosen_blocks_nor_beyond_its_tokens():
    """Memory that must not be read is NaN: a read would show in the output."""
    config = NSAConfig(slc_count=3)  # all forced
    given, caches = token(2, 12, 2, 64, 64, BF16), [filled(config, 2, 5000, 2, 64, 64, BF16, 8192) for _ in range(2)]
    for held in (caches[1].k_slc, caches[1].v_slc):
        held.buffer[:, 64 : 5000 // 64 * 64 - 64] = torch.nan
        held.buffer[:, 5001:] = torch.nan
    for held in (caches[1].k_cmp, caches[1].v_cmp):
        held.buffer[:, config.cmp_tokens(5001) :] = torch.nan
    assert torch.equal(step(given, caches[0]), step(given, caches[1]))
