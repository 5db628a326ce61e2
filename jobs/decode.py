"""Decoding throughput and bytes read against context length: NSA beside dense attention.

A step stores one token of every sequence in the caches of all layers and attends from it. It is checked against the
oracle, then timed at a constant context: each step first removes the token that the last one stored. If the project's
kernels compute the step, replays of a CUDA graph are timed, else eager calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.measure import check
from jobs.measure.call import FunctionCall, ModelCase, bare_model, measure_call
from jobs.measure.clock import TimingSpec
from jobs.measure.operator import WorkloadSpec
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, TELEMETRY, THROUGHPUT, TIME, Better, Plot, Quantity, Role
from jobs.specs.fields import (
    HeadsSpec,
    Layers,
    Unique,
    implementation_names,
)
from jobs.specs.fit import case_fields, does_not_fit, refuse_unusable
from jobs.specs.nsa_effect import refuse_idle
from nsa_core import NSAConfig, compress, nsa_attention
from nsa_core.backends import BACKENDS
from nsa_core.cache import DenseCache, NSACache, Triple
from nsa_core.decode import TRITON, dense_step, nsa_step
from nsa_core.model import PRESETS, LayerCache, ModelConfig, NSATransformer
from nsa_core.rope import angles, rotate

DENSE = "dense"
_THETA = 10_000.0  # RoPE's base if attention alone is measured

# A step makes equally many tokens at every context length, so the guides of its rate differ from those of a call.
STEP_THROUGHPUT = replace(THROUGHPUT, plot=Plot.STEP_RATE)
BYTES_READ = Quantity(
    "bytes_read", "MiB", "Bytes read by a step's attention", "bytes read", Better.LOWER, Role.HEADLINE
)
QUANTITIES = (TIME, STEP_THROUGHPUT, BYTES_READ, *AGREEMENT, *TELEMETRY)


class Case(ModelCase):
    """One decoding step at one context length; `timing` limits the time measurement."""

    timing: TimingSpec

    @property
    def tokens(self) -> int:
        """A step makes one of each sequence."""
        return self.batch


class Spec(WorkloadSpec):
    """A sweep of context lengths x implementations."""

    kind: Literal["decode"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    workload: Literal["attention", "model"] = Field(
        default="attention", description="attention: rotation, caches and attention of all layers; model: all of a step"
    )
    implementations: Annotated[list[str], Field(min_length=1), Unique, implementation_names(DENSE)]
    layers: Layers | None = Field(default=None, description="None: the preset's; 1 with a shape")
    shape: HeadsSpec | None = Field(default=None, description="instead of a preset, for workload attention")

    @model_validator(mode="after")
    def _check_shape(self) -> Spec:
        if self.preset is None and (self.shape is None or self.workload == "model"):
            raise ValueError(f"preset: missing; use one of {', '.join(PRESETS)}, or workload attention with a shape")
        refuse_idle(self, self.nsa, self.implementations, None)
        return self

    @property
    def model(self) -> ModelConfig:
        """The model, or the model whose attention is measured."""
        return self.model_of(self.layers)

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points, shortest contexts first.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        refuse_unusable(self.implementations, machine, self.dtype, self.model, {DENSE: None})
        points = []
        for seq_len, implementation in product(sorted(self.lengths), self.implementations):
            attention = {"attention": DENSE} if implementation == DENSE else {"backend": implementation}
            model = replace(self.model, **attention)
            if self.workload == "attention":
                nsa = NSAConfig() if implementation == DENSE else model.nsa  # dense attention has none
                sizes = {"nsa": nsa, "attention": model.attention, "backend": model.backend}
                model = bare_model(model.heads, model.kv_heads, model.head_dim, model.layers, **sizes)
            case = Case(
                workload=self.workload,
                implementation=implementation,
                pass_="decode",
                seq_len=seq_len,
                batch=self.batch,
                dtype=self.dtype,
                **case_fields(self, machine),
                model=model,
                timing=self.timing,
            )
            needed = held_bytes(model, self.batch, seq_len, case.torch_dtype.itemsize)
            points.append(
                Point(
                    kind="decode",
                    label=f"{implementation} decode S={seq_len}",
                    case=case,
                    axes=case.axes(layers=model.layers),  # steps go through all of them
                    skip_reason=does_not_fit(needed, self, machine, "shorten lengths, or lower batch or layers"),
                )
            )
        return points


def held_bytes(model: ModelConfig, batch: int, seq_len: int, itemsize: int) -> int:
    """Bytes of the caches: one key and one value for each token, layer and kv head; for NSA, compressed ones as well.

    Windows and the temporary tensors of a step are left out.
    """
    held = seq_len if model.attention == DENSE else seq_len + model.nsa.cmp_tokens(seq_len)
    return 2 * batch * model.layers * model.kv_heads * model.head_dim * itemsize * held


def bytes_read(model: ModelConfig, batch: int, seq_len: int, itemsize: int) -> float:
    """Bytes that the attention of one step reads from the caches, over all layers and sequences.

    With e bytes a number and D numbers a key or value, each sequence, layer and kv head reads

        dense: 2·D·e·S
        nsa: 2·D·e·(N + n + w + l/d) + 4·G·N

    for S tokens of context, N visible compressed tokens, n tokens in the chosen blocks up to the query, w in the
    window, l tokens compressed in every d-th step, and G heads a group, whose scores are read back in float32.
    Weights, activations, and the partial results of split keys are left out.
    """
    row = 2 * model.head_dim * itemsize
    if model.attention == DENSE:
        return float(batch * model.layers * model.kv_heads * row * seq_len)
    nsa, group = model.nsa, model.heads // model.kv_heads
    compressed = nsa.cmp_tokens(seq_len)
    chosen = min(seq_len, nsa.slc_count * nsa.slc_block - -seq_len % nsa.slc_block)
    tokens = compressed + chosen + min(seq_len, nsa.window) + nsa.cmp_block / nsa.cmp_stride
    return batch * model.layers * model.kv_heads * (row * tokens + 4 * group * compressed)


@torch.no_grad()
def measure(case: Case, beat: Beat) -> Measurement:
    """Check one point and measure its time.

    Raises:
        As measure_call.
    """
    measured = measure_call(
        case,
        lambda: check_steps(case),
        lambda: (model_step if case.workload == "model" else attention_step)(case, beat),
        beat,
        timing=case.timing,
        throughput=STEP_THROUGHPUT,
        graphed=lambda route: case.device == "cuda" and set(route.values()) == {TRITON},
        memory=False,
    )
    read = bytes_read(case.model, case.batch, case.seq_len, case.torch_dtype.itemsize) / 2**20
    counted = Metric.of(BYTES_READ, read, method="counted: what the attention of a step reads of its caches")
    return replace(measured, metrics=(*measured.metrics, counted))


def attention_step(case: Case, beat: Beat) -> FunctionCall:
    """A step of every layer's attention on random tokens; it takes unrotated queries, keys and values."""
    caches = _filled(case, beat)
    token = _tokens(case, case.batch, 1, case.seed + 1)
    rewind = _rewinding(caches, case.seq_len - 1)

    def step() -> list[Tensor]:
        rewind()
        return [_step(case, token, cache) for cache in caches]

    return FunctionCall(step, [])


def model_step(case: Case, beat: Beat) -> FunctionCall:
    """A step of the whole model up to the logits, after random keys and values."""
    torch.manual_seed(case.seed)
    model = NSATransformer(case.model).to(case.torch_device, case.torch_dtype).eval()
    caches = _filled(case, beat)
    token = torch.randint(case.model.vocab_size, (case.batch, 1), device=case.torch_device)
    rewind = _rewinding(caches, case.seq_len - 1)

    def step() -> Tensor:
        rewind()
        return model(token, cache=caches)

    return FunctionCall(step, [])


def _step(case: Case, token: Mapping[str, Tensor], cache: LayerCache) -> Tensor:
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


def _tokens(case: Case, batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """q [B,S,Hq,D], k and v [B,S,3,Hkv,D] and gate logits [B,S,Hq,3] from a seeded standard normal distribution."""
    generator, model = torch.Generator(case.torch_device).manual_seed(seed), case.model
    one_pair = (3, model.kv_heads, model.head_dim)
    sizes = {"q": (model.heads, model.head_dim), "k": one_pair, "v": one_pair, "gates": (model.heads, 3)}
    options = {"generator": generator, "dtype": case.torch_dtype, "device": case.torch_device}
    return {name: torch.randn(batch, tokens, *size, **options) for name, size in sizes.items()}


def _filled(case: Case, beat: Beat) -> list[LayerCache]:
    """One cache for each layer, full but for one token. The content does not influence the time."""
    generator, held, model = torch.Generator(case.torch_device).manual_seed(case.seed), case.seq_len - 1, case.model
    size = (case.batch, held, model.kv_heads, model.head_dim)
    caches: list[LayerCache] = []
    for layer in range(model.layers):
        beat("caches", layer, model.layers)
        x = torch.randn(size, generator=generator, dtype=case.torch_dtype, device=case.torch_device)
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


def check_steps(case: Case) -> check.Agreement:
    """Compare steps behind a prefilled cache with the float64 oracle on all tokens at once.

    The case has at most two kv heads, one block more than a query selects, and enough steps to complete a compressed
    token. All sides use the same rounded keys. A learned compression needs a layer; the mean replaces it here.

    Raises:
        WrongResult: the error exceeds the bound of `check.judge`.
    """
    model, kv_heads = case.model, min(case.model.kv_heads, 2)
    config, heads = replace(model.nsa, compress="mean"), kv_heads * (model.heads // model.kv_heads)
    small = case.model_copy(update={"model": replace(model, heads=heads, kv_heads=kv_heads, nsa=config)})
    steps = config.cmp_stride + 1
    seq_len = (config.slc_count + 1) * config.slc_block + config.cmp_stride // 2 + 1
    tokens = _tokens(small, 1, seq_len, case.seed)
    cache = _prefilled(small, tokens, seq_len - steps)
    singles = ({name: x[:, i : i + 1] for name, x in tokens.items()} for i in range(seq_len - steps, seq_len))
    got = torch.cat([_step(small, single, cache) for single in singles], 1)
    truth = _last_rows(small, tokens, steps, "reference", torch.float64)
    eager = _last_rows(small, tokens, steps, "naive", case.torch_dtype)
    where = f"{steps} steps to S={seq_len}, {heads}/{kv_heads} heads of {model.head_dim}"
    outputs = {"output": got}, {"output": eager}, {"output": truth}
    return check.judge(*outputs, case.torch_dtype, where, case.implementation)


def _prefilled(case: Case, tokens: Mapping[str, Tensor], held: int) -> LayerCache:
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


def _last_rows(case: Case, tokens: Mapping[str, Tensor], rows: int, backend: str, dtype: torch.dtype) -> Tensor:
    """Attention [1,rows,Hq,D] of the last rows to all tokens; rotated in the given dtype, then computed in `dtype`."""
    config = case.model.nsa
    q, k, v = _rotated(tokens)
    k_cmp, v_cmp = (x.to(dtype) for x in _means(config)(k[0], v[0], 0))
    q, gates = q[:, -rows:].to(dtype), torch.sigmoid(tokens["gates"])[:, -rows:].to(dtype)
    keys, values = ((cmp.to(dtype), slc.to(dtype), win.to(dtype)) for cmp, slc, win in (k, v))
    if case.model.attention == DENSE:
        return BACKENDS[backend].window(q, keys[1], values[1], None, keys[1].shape[1], q.shape[-1] ** -0.5)
    return nsa_attention(q, keys, values, gates, config, k_cmp=k_cmp, v_cmp=v_cmp, backend=backend)


def _rotated(tokens: Mapping[str, Tensor]) -> tuple[Tensor, Triple, Triple]:
    """q, and keys (cmp unrotated) and values of the three branches, rotated from position 0 on."""
    q, (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win) = tokens["q"], tokens["k"].unbind(2), tokens["v"].unbind(2)
    cos, sin = angles(torch.arange(q.shape[1], device=q.device), q.shape[-1], _THETA, q.dtype)
    return rotate(q, cos, sin), (k_cmp, rotate(k_slc, cos, sin), rotate(k_win, cos, sin)), (v_cmp, v_slc, v_win)
