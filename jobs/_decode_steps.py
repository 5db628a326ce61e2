"""Decoding steps to measure: random tokens, caches filled with them, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from jobs.measure import check
from jobs.measure.case import PointCase
from jobs.schema.point import Beat
from nsa_core import NSAConfig, compress, nsa_attention
from nsa_core.backends import BACKENDS
from nsa_core.cache import DenseCache, NSACache, Triple
from nsa_core.decode import dense_step, nsa_step
from nsa_core.model import LayerCache, NSATransformer
from nsa_core.rope import angles, rotate

DENSE = "dense"
_THETA = 10_000.0  # RoPE's base if attention alone is measured


class DecodeCase(PointCase):
    """A point's configuration: one decoding step at one context length."""

    def _used(self) -> tuple[str, ...]:
        used = ("heads", "kv_heads", "head_dim", "layers", "attention", "backend")
        return used + (() if self.implementation == DENSE else ("nsa",))


def attention_step(case: DecodeCase, device: torch.device, beat: Beat) -> Callable[[], object]:
    """A step of every layer's attention on random tokens; it takes unrotated queries, keys and values."""
    caches = _filled(case, device, beat)
    token = _tokens(case, case.batch, 1, device, case.seed + 1)
    rewind = _rewinding(caches, case.seq_len - 1)

    def step() -> list[Tensor]:
        rewind()
        return [_step(case, token, cache) for cache in caches]

    return step


def model_step(case: DecodeCase, device: torch.device, beat: Beat) -> Callable[[], object]:
    """A step of the whole model up to the logits, after random keys and values."""
    torch.manual_seed(case.seed)
    model = NSATransformer(case.model).to(device, case.torch_dtype).eval()
    caches = _filled(case, device, beat)
    token = torch.randint(case.model.vocab_size, (case.batch, 1), device=device)
    rewind = _rewinding(caches, case.seq_len - 1)

    def step() -> Tensor:
        rewind()
        return model(token, cache=caches)

    return step


def _step(case: DecodeCase, token: Mapping[str, Tensor], cache: LayerCache) -> Tensor:
    """Output [B,1,Hq,D] of one layer's attention for a token of `_tokens`."""
    q, k, v = token["q"], token["k"], token["v"]
    if isinstance(cache, DenseCache):
        return dense_step(q, k[:, :, 1], v[:, :, 1], cache, theta=_THETA)
    means = _means(cache.config)
    return nsa_step(q, k, v, token["gates"], cache, theta=_THETA, compress=means, backend=case.implementation)


def _means(config: NSAConfig) -> Callable[[Tensor, Tensor, Tensor | int], tuple[Tensor, Tensor]]:
    """Mean compression of keys, rotated to the position of their block's first token, and of values."""

    def compressed(k: Tensor, v: Tensor, position: Tensor | int) -> tuple[Tensor, Tensor]:
        k = compress(k, config)
        starts = torch.arange(k.shape[1], device=k.device) * config.cmp_stride + position
        return rotate(k, *angles(starts, k.shape[-1], _THETA, k.dtype)), compress(v, config)

    return compressed


def _tokens(case: DecodeCase, batch: int, tokens: int, device: torch.device, seed: int) -> dict[str, Tensor]:
    """q [B,S,Hq,D], k and v [B,S,3,Hkv,D] and gate logits [B,S,Hq,3] from a seeded standard normal distribution."""
    generator, model = torch.Generator(device).manual_seed(seed), case.model
    one_pair = (3, model.kv_heads, model.head_dim)
    sizes = {"q": (model.heads, model.head_dim), "k": one_pair, "v": one_pair, "gates": (model.heads, 3)}
    options = {"generator": generator, "dtype": case.torch_dtype, "device": device}
    return {name: torch.randn(batch, tokens, *size, **options) for name, size in sizes.items()}


def _filled(case: DecodeCase, device: torch.device, beat: Beat) -> list[LayerCache]:
    """One cache for each layer, full but for one token. The content does not influence the time."""
    generator, held, model = torch.Generator(device).manual_seed(case.seed), case.seq_len - 1, case.model
    size = (case.batch, held, model.kv_heads, model.head_dim)
    caches: list[LayerCache] = []
    for layer in range(model.layers):
        beat("caches", layer, model.layers)
        x = torch.randn(size, generator=generator, dtype=case.torch_dtype, device=device)
        if model.attention == DENSE:
            cache = DenseCache(case.seq_len)
            cache.take(x, x)
        else:
            cache, seen = NSACache(model.nsa, case.seq_len), model.nsa.cmp_tokens(held)
            cache.take((x, x, x), (x, x, x))
            cache.add_compressed(x[:, :seen], x[:, :seen])
        caches.append(cache)
    return caches


def _rewinding(caches: list[LayerCache], held: int) -> Callable[[], None]:
    """A function that makes all caches hold `held` tokens again, in one operation on the device."""
    first = caches[0].position
    assert first is not None
    positions = first.new_full((len(caches), 4), held)
    for cache, position in zip(caches, positions, strict=True):
        cache.position = position[:1]  # four numbers apart: kernels want their pointers aligned

    def rewind() -> None:
        positions.fill_(held)
        for cache in caches:
            cache.note_length(held)

    return rewind


def check_steps(case: DecodeCase, device: torch.device) -> check.Agreement:
    """Compare steps behind a prefilled cache with the float64 oracle on all tokens at once.

    The case has at most two kv heads, one block more than a query selects, and enough steps to complete a compressed
    token. All sides use the same rounded keys. A learned compression needs a layer; the mean replaces it here.

    Raises:
        WrongResult: the error exceeds the bound of `check.judge`.
    """
    model, kv_heads = case.model, min(case.model.kv_heads, 2)
    config, heads = replace(model.nsa, compress="mean"), kv_heads * (model.heads // model.kv_heads)
    small = replace(case, model=replace(model, heads=heads, kv_heads=kv_heads, nsa=config))
    steps = config.cmp_stride + 1
    seq_len = (config.slc_count + 1) * config.slc_block + config.cmp_stride // 2 + 1
    tokens = _tokens(small, 1, seq_len, device, case.seed)
    cache = _prefilled(small, tokens, seq_len - steps)
    singles = ({name: x[:, i : i + 1] for name, x in tokens.items()} for i in range(seq_len - steps, seq_len))
    got = torch.cat([_step(small, single, cache) for single in singles], 1)
    truth = _last_rows(small, tokens, steps, "reference", torch.float64)
    eager = _last_rows(small, tokens, steps, "naive", case.torch_dtype)
    where = f"{steps} steps to S={seq_len}, {heads}/{kv_heads} heads of {model.head_dim}"
    outputs = {"output": got}, {"output": eager}, {"output": truth}
    return check.judge(*outputs, case.torch_dtype, where, case.implementation)


def _prefilled(case: DecodeCase, tokens: Mapping[str, Tensor], held: int) -> LayerCache:
    """A cache that holds the first `held` tokens."""
    _, k, v = _rotated({name: x[:, :held] for name, x in tokens.items()})
    if case.model.attention == DENSE:
        cache = DenseCache()
        cache.take(k[1], v[1])
        return cache
    cache = NSACache(case.model.nsa)
    cache.take(k, v)
    cache.add_compressed(*_means(case.model.nsa)(k[0], v[0], 0))
    return cache


def _last_rows(case: DecodeCase, tokens: Mapping[str, Tensor], rows: int, backend: str, dtype: torch.dtype) -> Tensor:
    """Attention [1,rows,Hq,D] of the last rows to all tokens; rotated in the given dtype, then computed in `dtype`."""
    config = case.model.nsa
    q, k, v = _rotated(tokens)
    k_cmp, v_cmp = (x.to(dtype) for x in _means(config)(k[0], v[0], 0))
    q, gates = q[:, -rows:].to(dtype), torch.sigmoid(tokens["gates"])[:, -rows:].to(dtype)
    keys, values = (_in_dtype(xs, dtype) for xs in (k, v))
    if case.model.attention == DENSE:
        return BACKENDS[backend].window(q, keys[1], values[1], None, keys[1].shape[1], q.shape[-1] ** -0.5)
    return nsa_attention(q, keys, values, gates, config, k_cmp=k_cmp, v_cmp=v_cmp, backend=backend)


def _in_dtype(xs: Triple, dtype: torch.dtype) -> Triple:
    return xs[0].to(dtype), xs[1].to(dtype), xs[2].to(dtype)


def _rotated(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Triple, Triple]:
    """q, and keys (cmp unrotated) and values of the three branches, rotated from position 0 on."""
    q, (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win) = tokens["q"], tokens["k"].unbind(2), tokens["v"].unbind(2)
    cos, sin = angles(torch.arange(q.shape[1], device=q.device), q.shape[-1], _THETA, q.dtype)
    return rotate(q, cos, sin), (k_cmp, rotate(k_slc, cos, sin), rotate(k_win, cos, sin)), (v_cmp, v_slc, v_win)
