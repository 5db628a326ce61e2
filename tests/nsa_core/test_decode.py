"""Decoding with the cache gives what prefill gives, and reads only what it should."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import nsa_core.decode
import nsa_core.layer
from nsa_core import InputError, NSAConfig
from nsa_core.cache import NSACache
from nsa_core.layer import DenseAttention, NativeSparseAttention
from nsa_core.model import PRESETS, NSATransformer

SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=10)
LENGTH = 75  # a multiple of no size


def layer_of(config: NSAConfig, heads: int = 4, kv_heads: int = 2) -> NativeSparseAttention:
    torch.manual_seed(0)
    layer = NativeSparseAttention(24, heads, kv_heads, 8, config).double()
    torch.nn.init.normal_(layer.gate_proj.weight)
    return layer


CONFIGS = {
    "mean": SMALL,
    "learned": replace(SMALL, compress="mlp"),
    "no-overlap": replace(SMALL, cmp_stride=8),
    "few-blocks": replace(SMALL, slc_count=2, init_blocks=0, local_blocks=0),
    "window-of-one": replace(SMALL, window=1),
    "paper": NSAConfig(),
}


CHUNKS = [3, 20, 22, 41, 43, 72]


@pytest.mark.parametrize(
    ("name", "cuts"),
    [*((name, cuts) for name in CONFIGS for cuts in ([], CHUNKS)), *(("mean", [cut]) for cut in (1, 7, 8, 40, 65, 74))],
)
@torch.no_grad()
def test_prefills_and_steps_give_what_one_prefill_gives(name: str, cuts: list[int]) -> None:
    layer, x = layer_of(CONFIGS[name]), torch.randn(2, LENGTH, 24, dtype=torch.float64)
    cache = layer.new_cache()
    bounds = [0, *cuts, *range((cuts or [0])[-1] + 1, LENGTH + 1)]
    steps = torch.cat([layer(x[:, a:b], cache) for a, b in pairwise(bounds)], 1)
    torch.testing.assert_close(steps, layer(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@torch.no_grad()
def test_model_steps_give_the_logits_of_prefill(attention: str) -> None:
    torch.manual_seed(0)
    model = NSATransformer(replace(PRESETS["tiny"], attention=attention)).double()
    tokens = torch.randint(256, (2, LENGTH))
    cache = model.new_cache()
    steps = [model(part, cache=cache) for part in (tokens[:, :33], tokens[:, 33:50], *tokens[:, 50:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=1e-9, atol=1e-11)


@torch.no_grad()
def test_generate_takes_the_likeliest_token_of_every_step() -> None:
    torch.manual_seed(0)
    model = NSATransformer(PRESETS["tiny"]).double()
    tokens = torch.randint(256, (2, 21))
    expected = tokens
    for _ in range(12):
        expected = torch.cat((expected, model(expected)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(tokens, 12), expected)


@torch.no_grad()
def test_step_compresses_only_the_block_that_it_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = layer_of(SMALL), NSACache(SMALL)
    layer(torch.randn(1, 40, 24, dtype=torch.float64), cache)
    lengths = []

    def watched(x: torch.Tensor, config: NSAConfig) -> torch.Tensor:
        lengths.append(x.shape[1])
        return real(x, config)

    real = nsa_core.layer.compress
    monkeypatch.setattr(nsa_core.layer, "compress", watched)
    for _ in range(9):
        layer(torch.randn(1, 1, 24, dtype=torch.float64), cache)
    assert len(lengths) == 18
    assert max(lengths) <= SMALL.cmp_block
    assert cache.k_cmp.length == SMALL.cmp_tokens(49)


@torch.no_grad()
def test_step_reads_neither_unchosen_blocks_nor_tokens_before_the_window() -> None:
    """Blocks that must not be read are NaN, which would show in the output."""
    config = replace(SMALL, slc_count=3)  # one initial and two local blocks: all are forced
    layer, cache = layer_of(config), NSACache(config)
    x = torch.randn(1, LENGTH, 24, dtype=torch.float64)
    layer(x[:, :-1], cache)
    last = (LENGTH - 1) // config.slc_block
    for buffer in (cache.k_slc, cache.v_slc):
        buffer.values()[:, config.slc_block : (last - 1) * config.slc_block] = torch.nan
    torch.testing.assert_close(layer(x[:, -1:], cache), layer(x)[:, -1:], rtol=1e-10, atol=1e-12)
    assert cache.k_win.values().shape[1] == config.window


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_tokens_that_cannot_follow_are_refused_before_any_is_stored(kind: str) -> None:
    layer: Any = layer_of(SMALL).float() if kind == "nsa" else DenseAttention(24, 4, 2, 8)
    x, cache = torch.randn(2, 26, 24), layer.new_cache(24)
    layer(x[:, :20], cache)
    for tokens in (1, 3):
        with pytest.raises(InputError, match=r"^cache: gradients are enabled: continue it under torch.no_grad"):
            layer(x[:, 20 : 20 + tokens], cache)
    with torch.no_grad():
        for tokens in (1, 3):
            refused = pytest.raises(InputError, match=r"^dtype: torch.bfloat16: continue in torch.float32")
            with torch.autocast("cpu", torch.bfloat16), refused:
                layer(x[:, 20 : 20 + tokens], cache)
        for given, message in ((x[:, 20:], "^capacity: 24: use at least 26"), (x[:1, 20:21], "^batch: 1: use 2, ")):
            with pytest.raises(InputError, match=message):
                layer(given, cache)
        assert cache.length == int(cache.position) == 20
        torch.testing.assert_close(layer(x[:, 20:24], cache), layer(x[:, :24])[:, 20:])
        with pytest.raises(InputError, match=r"^capacity: 25: use at least 26"):
            layer(x, layer.new_cache(25))


@pytest.mark.parametrize("kind", ["nsa", "dense"])
@torch.no_grad()
def test_tokens_that_replays_of_a_graph_stored_are_counted_by_a_prefill(kind: str) -> None:
    layer = layer_of(SMALL) if kind == "nsa" else DenseAttention(24, 4, 2, 8).double()
    x, cache = torch.randn(1, 30, 24, dtype=torch.float64), layer.new_cache(30)
    layer(x[:, :23], cache)  # type: ignore[arg-type]
    cache.note_length(20)  # all that the host knows of
    torch.testing.assert_close(layer(x[:, 23:], cache), layer(x)[:, 23:])  # type: ignore[arg-type]


@torch.no_grad()
def test_beyond_the_capacity_no_compressed_token_is_overwritten() -> None:
    """Replays of a graph may go beyond the capacity: here a token completes the 65th where there is room for 64."""
    layer, capacity = layer_of(CONFIGS["learned"]), 263
    cache = layer.new_cache(capacity)
    layer(torch.randn(1, capacity, 24, dtype=torch.float64), cache)
    before = cache.k_cmp.buffer.clone()
    assert before.shape[1] == SMALL.cmp_tokens(capacity) == SMALL.cmp_tokens(capacity + 1) - 1
    nsa_core.decode._store_learned(cache, layer._compress)
    assert torch.equal(cache.k_cmp.buffer, before)
