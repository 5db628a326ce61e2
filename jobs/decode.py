"""Decoding throughput and bytes read against context length: NSA beside dense attention.

A step stores one token of every sequence in the caches of all layers and attends from it. It is checked against the
oracle on a small case, then timed at a constant context: each step first removes the token that the last one stored.
If the project's kernels compute the step, replays of a CUDA graph are timed, else eager calls. Rows of what the last
timed step attends to are checked as well; for workload model those of an untimed step of attention alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.measure.call import FunctionCall, ModelCase, bare_model, measure_call
from jobs.measure.check import Agreement, Operator, judge, small_case
from jobs.measure.passes import WorkloadSpec
from jobs.measure.rows import RowCheck, row_metrics
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, TELEMETRY, THROUGHPUT, TIME, Better, Plot, Quantity, Role
from jobs.specs.fields import HeadsSpec, Layers, OrDense
from jobs.specs.fit import does_not_fit, refuse_idle, refuse_unusable
from nsa_core import NSAConfig, compress
from nsa_core.backends import BACKENDS, naive
from nsa_core.cache import DenseCache, NSACache
from nsa_core.decode import TRITON, dense_step, nsa_step
from nsa_core.model import LayerCache, ModelConfig, NSATransformer
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
    """One decoding step at one context length."""

    @property
    def tokens(self) -> int:  # of a step
        return self.batch

    def check(self) -> Agreement:
        """Compare steps behind a prefilled cache with the float64 oracle on all tokens at once. Raises WrongResult.

        Their number completes a compressed token. All sides use the same rounded keys. A learned compression needs a
        layer; the mean replaces it here.
        """
        config = replace(self.model.nsa, compress="mean")
        heads, seq_len = small_case(config, self.shape)
        model = replace(self.model, heads=heads.query_heads, kv_heads=heads.kv_heads, nsa=config)
        small, steps = self.model_copy(update={"model": model}), config.cmp_stride + 1
        tokens = _tokens(small, 1, seq_len, self.seed)
        q, k, v = tokens["q"], tokens["k"].unbind(2), tokens["v"].unbind(2)
        cos, sin = angles(torch.arange(seq_len, device=q.device), q.shape[-1], _THETA, q.dtype)
        # Keys are rotated but for those that are compressed first.
        keys, values = (k[0], rotate(k[1], cos, sin), rotate(k[2], cos, sin)), (v[0], v[1], v[2])
        early_k, early_v = ((a[:, :-steps], b[:, :-steps], c[:, :-steps]) for a, b, c in (keys, values))
        if model.attention == DENSE:
            cache = DenseCache()
            cache.take(early_k[1], early_v[1])
        else:
            cache = NSACache(config)
            cache.take(early_k, early_v)
            cache.add_compressed(*_means(config, early_k[0], early_v[0], 0))
        singles = ({name: x[:, i : i + 1] for name, x in tokens.items()} for i in range(seq_len - steps, seq_len))
        got = torch.cat([_step(small, single, cache) for single in singles], 1)
        last = rotate(q, cos, sin)[:, -steps:], torch.sigmoid(tokens["gates"])[:, -steps:]
        parts = *last, keys, values, _means(config, keys[0], values[0], 0)
        eager = _attention(small, parts, "naive", self.torch_dtype)
        truth = _attention(small, parts, "reference", torch.float64)
        outputs = {"output": got}, {"output": eager}, {"output": truth}
        return judge(*outputs, self.torch_dtype, f"{steps} steps to S={seq_len}, {heads}", self.implementation)


class Spec(WorkloadSpec):
    """A sweep of context lengths x implementations."""

    kind: Literal["decode"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    workload: Literal["attention", "model"] = Field(
        default="attention", description="attention: rotation, caches and attention of all layers; model: all of a step"
    )
    implementations: OrDense
    layers: Layers | None = Field(default=None, description="None: the model's; 1 with a shape")
    shape: HeadsSpec | None = Field(default=None, description="instead of a preset, for workload attention")

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.shape is not None and self.workload == "model":
            raise ValueError("shape: is of attention alone; give a preset or a model, or use workload: attention")
        refuse_idle(self, self.own_nsa, self.implementations, None)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points, shortest contexts first."""
        base, points = self.model_of(self.layers), []
        refuse_unusable(self.implementations, machine, self.dtype, base, (DENSE,))
        for seq_len, implementation in product(sorted(self.lengths), self.implementations):
            dense, model = implementation == DENSE, base
            if self.workload == "attention":  # sizes of NSA may not change the key of dense attention
                model = bare_model(HeadsSpec.of(base), None if dense else base.nsa, base.layers)
            model = model.under(implementation)
            own = {"workload": self.workload, "dtype": self.dtype, "timing": self.timing, "model": model}
            case = Case.of(self, machine, (implementation, "decode", seq_len, self.batch), **own)
            # Caches hold a key and a value for each token, layer and kv head; NSA's also the compressed ones.
            held = seq_len + (0 if dense else model.nsa.cmp_tokens(seq_len))
            row = 2 * model.kv_heads * model.head_dim * case.torch_dtype.itemsize
            needed = self.batch * model.layers * row * held
            skip = does_not_fit(needed, self, machine, "shorten lengths, or lower batch or layers")
            axes = case.axes(layers=model.layers)  # steps go through all of them
            points.append(Point("decode", f"{implementation} decode S={seq_len}", case, axes, skip_reason=skip))
        return points


def bytes_read(model: ModelConfig, batch: int, seq_len: int, itemsize: int) -> float:
    """Bytes that the attention of one step reads from the caches, over all layers and sequences.

    Each sequence, layer and kv head reads 2·D·e·S, or of NSA 2·D·e·(N + n + w + l/d) + 4·G·N, with e bytes a number
    and D numbers a key: S tokens of context, N visible compressed tokens, n in the chosen blocks up to the query, w in
    the window, l compressed in every d-th step; G heads a group, whose scores are read back in float32.
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
    """Check one point and measure its time. Raises as measure_call."""
    measured = measure_call(
        case,
        lambda: steps_of(case, beat),
        beat,
        throughput=STEP_THROUGHPUT,
        graphed=lambda route: case.device == "cuda" and set(route.values()) == {TRITON},
        memory=False,
    )[1]
    rows: tuple[Metric, ...] = ()
    if case.workload == "model":
        model = replace(case.model, layers=1, nsa=replace(case.model.nsa, compress="mean"))
        alone = steps_of(case.model_copy(update={"workload": "attention", "model": model}), beat)
        assert alone.rows is not None
        alone.rows.take(alone.run())
        rows = alone.rows.judge()
    read = bytes_read(case.model, case.batch, case.seq_len, case.torch_dtype.itemsize) / 2**20
    counted = Metric.of(BYTES_READ, read, method="counted: what the attention of a step reads of its caches")
    return replace(measured, metrics=(*measured.metrics, *rows, counted))


def steps_of(case: Case, beat: Beat) -> FunctionCall:
    """A step of every layer's attention on random tokens, or of the whole model up to the logits. The caches are full
    but for one token, which a step stores and the next one removes, in one operation on the device."""
    torch.manual_seed(case.seed)
    device, dtype, model, held = case.torch_device, case.torch_dtype, case.model, case.seq_len - 1
    whole = NSATransformer(model).to(device, dtype).eval() if case.workload == "model" else None
    generator = torch.Generator(device).manual_seed(case.seed)
    caches: list[LayerCache] = []
    x = torch.empty(0)
    for layer in range(model.layers):
        beat("caches", layer, model.layers)
        size = case.batch, held, model.kv_heads, model.head_dim
        x = torch.randn(size, generator=generator, dtype=dtype, device=device)  # which does not influence the time
        if model.attention == DENSE:
            cache = DenseCache(case.seq_len)
            cache.take(x, x)
        else:
            cache, seen = NSACache(model.nsa, case.seq_len), model.nsa.cmp_tokens(held)
            cache.take((x, x, x), (x, x, x))
            cache.add_compressed(x[:, :seen], x[:, :seen])
        caches.append(cache)
    assert caches[0].position is not None
    positions = caches[0].position.new_full((len(caches), 4), held)
    for cache, position in zip(caches, positions, strict=True):
        cache.position = position[:1]  # four numbers apart: kernels want their pointers aligned
    tokens = _tokens(case, case.batch, 1, case.seed + 1)
    token = torch.randint(model.vocab_size, (case.batch, 1), device=device)

    def step() -> object:
        positions.fill_(held)
        for cache in caches:
            cache.note_length(held)
        return [_step(case, tokens, cache) for cache in caches] if whole is None else whole(token, cache=caches)

    return FunctionCall(step, [], None if whole is not None else StepCheck(case, x, tokens))


class StepCheck(RowCheck):
    """Checks the last layer's output of a step against float64 on what its cache was filled with: that of the first kv
    head in the first sequence, and of the last in the last, where an offset that has outgrown 32 bits is wrong first.
    """

    def __init__(self, case: Case, filled: Tensor, tokens: Mapping[str, Tensor]) -> None:
        self._case, self._inputs, self._taken = case, tokens, []
        self._generator = torch.Generator(filled.device).manual_seed(case.seed + 2)
        places = {(0, 0), (len(filled) - 1, filled.shape[2] - 1)}
        self._filled = {(b, h): filled[b : b + 1, :, h : h + 1].clone() for b, h in places}

    def take(self, result: Any) -> None:
        """Copy the last layer's output as the present stream sees it."""
        self._taken = [{"output": result[-1].clone()}]

    def judge(self) -> tuple[Metric, Metric]:
        """Error and bound of the last output taken, as metrics. Raises WrongResult.

        Of choices of blocks that tie in float64, any is right.
        """
        case, model, config, dtype = self._case, self._case.model, self._case.model.nsa, self._case.torch_dtype
        group, sides = model.heads // model.kv_heads, ({}, {}, {})  # got, eager, truth
        for (b, h), x in self._filled.items():
            heads, held = slice(h * group, (h + 1) * group), x.shape[1]
            q, gates = (self._inputs[name][b : b + 1, :, heads] for name in ("q", "gates"))
            k, v = (self._inputs[name][b : b + 1, :, :, h : h + 1].unbind(2) for name in "kv")
            turn = angles(torch.arange(held, held + 1, device=x.device), x.shape[-1], _THETA, dtype)
            k, q = (k[0], rotate(k[1], *turn), rotate(k[2], *turn)), rotate(q, *turn)
            keys, values = ([torch.cat([x, y], 1) for y in new] for new in (k, v))
            seen, block = config.cmp_tokens(held), config.cmp_block
            last = _means(config, keys[0][:, -block:], values[0][:, -block:], held + 1 - block)
            new = config.cmp_tokens(held + 1) - seen
            compressed = [torch.cat([x[:, :seen], y[:, :new]], 1) for y in last]
            parts = q, torch.sigmoid(gates), keys, values, compressed
            got, pairs = self._taken[0]["output"][b : b + 1, :, heads].double(), []
            for blocks in [None] if model.attention == DENSE else _choices(config, q, compressed[0], held):
                eager = _attention(case, parts, "naive", dtype, blocks)
                pairs.append((eager, _attention(case, parts, "reference", torch.float64, blocks)))
            nearest = min(pairs, key=lambda pair: (got - pair[1]).abs().max().item())
            for side, y in zip(sides, (got, *nearest), strict=True):
                side[f"output of sequence {b}, kv head {h}"] = y
        where = f"a row of {len(self._filled)} at S={case.seq_len}"
        return row_metrics(judge(*sides, dtype, where, case.implementation))


def _choices(config: NSAConfig, q: Tensor, k_cmp: Tensor, position: int) -> Iterator[Tensor]:
    """Blocks [1,1,1,n] that a query of one kv head may choose: float64's, and others whose ranks are within a tie."""
    ranks = naive.block_ranks(q.double(), k_cmp.double(), config, position, q.shape[-1] ** -0.5).flatten()
    count, tie = min(config.slc_count, len(ranks)), 1 - Operator.tie
    least = ranks.sort(descending=True).values[count - 1]
    sure = (ranks * tie > least).nonzero().flatten().tolist()
    tied = ((ranks * tie <= least) & (ranks >= least * tie)).nonzero().flatten().tolist()
    for some in combinations(tied, count - len(sure)):
        chosen = [*sorted([*sure, *some]), *[-1] * (config.slc_count - count)]
        yield torch.tensor(chosen, device=q.device).view(1, 1, 1, -1)


def _step(case: Case, token: Mapping[str, Tensor], cache: LayerCache) -> Tensor:
    """Output [B,1,Hq,D] of one layer's attention for a token of `_tokens`."""
    q, k, v = token["q"], token["k"], token["v"]
    if isinstance(cache, DenseCache):
        return dense_step(q, k[:, :, 1], v[:, :, 1], cache, theta=_THETA)
    means = partial(_means, cache.config)
    return nsa_step(q, k, v, token["gates"], cache, theta=_THETA, compress=means, backend=case.implementation)


def _means(config: NSAConfig, k: Tensor, v: Tensor, position: Tensor | int) -> tuple[Tensor, Tensor]:
    """Mean compression of keys, rotated to the position of their block's first token, and of values."""
    k = compress(k, config)
    starts = torch.arange(k.shape[1], device=k.device) * config.cmp_stride + position
    return rotate(k, *angles(starts, k.shape[-1], _THETA, k.dtype)), compress(v, config)


def _tokens(case: Case, batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """q [B,S,Hq,D], k and v [B,S,3,Hkv,D] and gate logits [B,S,Hq,3] from a seeded standard normal distribution."""
    generator, model = torch.Generator(case.torch_device).manual_seed(seed), case.model
    one_pair = (3, model.kv_heads, model.head_dim)
    sizes = {"q": (model.heads, model.head_dim), "k": one_pair, "v": one_pair, "gates": (model.heads, 3)}
    options = {"generator": generator, "dtype": case.torch_dtype, "device": case.torch_device}
    return {name: torch.randn(batch, tokens, *size, **options) for name, size in sizes.items()}


def _attention(
    case: Case,
    parts: tuple[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    backend: str,
    dtype: torch.dtype,
    blocks: Tensor | None = None,
) -> Tensor:
    """Attention [1,rows,Hq,D] of the last rows to all tokens, computed in `dtype`; blocks None: the backend's choice.

    `parts` are q and gates of the rows, keys and values of each branch, rotated, and the compressed key and value.
    """
    config, by = case.model.nsa, BACKENDS[backend]
    q, gates = (x.to(dtype) for x in parts[:2])
    keys, values, (k_cmp, v_cmp) = ([x.to(dtype) for x in each] for each in parts[2:])
    scale, offset = q.shape[-1] ** -0.5, keys[0].shape[1] - q.shape[1]
    if case.model.attention == DENSE:
        return by.window(q, keys[1], values[1], None, keys[1].shape[1], scale)
    if blocks is None:
        blocks = by.select(q, k_cmp, config, offset, scale)
    cmp, slc, win = gates.unbind(-1)
    out = by.compressed(q, k_cmp, v_cmp, cmp, config, offset, scale)
    out += by.selected(q, keys[1], values[1], slc, blocks, config, scale)
    return out + by.window(q, keys[2], values[2], win, config.window, scale)
