"""Check of an implementation before it is timed, against the float64 oracle on a small case of the same configuration.

The error may be at most twice that of an eager run in the same dtype (the naive backend's plain matrix products), plus
a floor for cases that the eager run hits by luck, and at most a ceiling whatever the eager run does. Errors are
max |x - oracle| / max |oracle|, the worst over the output and, for forward+backward, every gradient. All sides attend
to the blocks that the implementation selected. The selection itself is compared with float64's over a longer
sequence, and may differ only where scores tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from jobs.schema.point import Metric
from jobs.schema.quantities import ORACLE_ERROR, ORACLE_ERROR_BOUND
from jobs.specs.fields import DENSE_KERNELS, HeadsSpec
from nsa_core import NSAConfig, compress, dense_attention, nsa_attention, select_blocks
from nsa_core.backends import BACKENDS, Backend, naive
from nsa_core.functional import BRANCHES
from nsa_core.model import ModelConfig, NSATransformer
from nsa_core.routes import Branch

MISMATCH = 0.005  # share of the queries with a choice whose selection may differ from the oracle's by more than ties
REACHES = 4  # length of the sequence for comparing selections, in multiples of a query's selected tokens
_SEQUENCES = 2
CEILING = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # highest bound on the error


class WrongResult(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """An implementation disagrees with the oracle, and is not timed."""


@dataclass(frozen=True)
class Agreement:
    error: float  # relative to the oracle's largest value; the worst over output and gradients
    bound: float  # highest error allowed
    case: str  # description of the tensors compared
    factor: float = 2  # multiple of an eager run's error in the bound
    rows: tuple[Metric, ...] = ()  # error and bound of rows at the size of a pass

    def metrics(self) -> list[Metric]:
        error, bound = "max |x - oracle| / max |oracle|", f"{self.factor:g} times an eager run's in the dtype"
        return [
            Metric.of(ORACLE_ERROR, self.error, method=f"{error}, {self.case}"),
            Metric.of(ORACLE_ERROR_BOUND, self.bound, method=f"{bound}, plus a floor"),
            *self.rows,
        ]


@dataclass(frozen=True)
class Operator:
    """An implementation of attention as it is called, and what its results are held to."""

    name: str
    computes: NSAConfig | None  # None: dense causal attention, without gates
    attend: Callable[[Mapping[str, Tensor]], Tensor]  # output [B,S,Hq,D] of the inputs
    choose: Callable[[Mapping[str, Tensor]], Tensor]  # blocks [B,S,Hkv,n] that it selects, ascending, -1 last
    branches: tuple[Branch, ...] = BRANCHES
    tie: float = 1e-3  # relative difference of scores of which either may be chosen: products of bf16 summed in float32
    factor: float = 2  # times an eager run's error that is right

    @classmethod
    def of(cls, name: str, config: NSAConfig, branches: tuple[Branch, ...] = BRANCHES) -> Operator:
        """An implementation of this project, on q, k, v and gate logits."""
        kernel = DENSE_KERNELS.get(name)

        def attend(inputs: Mapping[str, Tensor]) -> Tensor:
            q, k, v = inputs["q"], inputs["k"], inputs["v"]
            if kernel is not None:
                return dense_attention(q, k, v, backend=kernel)
            return nsa_attention(q, k, v, torch.sigmoid(inputs["gates"]), config, backend=name, branches=branches)

        def choose(inputs: Mapping[str, Tensor]) -> Tensor:
            return select_blocks(inputs["q"].detach(), inputs["k"].detach(), config, backend=name)

        return cls(name, None if kernel is not None else config, attend, choose, branches)

    @property
    def selects(self) -> bool:
        return self.computes is not None and "slc" in self.branches


def make_inputs(
    shape: HeadsSpec, batch: int, seq_len: int, dtype: torch.dtype, device: torch.device, seed: int, backward: bool
) -> dict[str, Tensor]:
    """q [B,S,Hq,D], k, v [B,S,Hkv,D] and gate logits [B,S,Hq,3] from a seeded standard normal distribution."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": backward}
    options["generator"] = torch.Generator(device).manual_seed(seed)
    keys = shape.kv_heads, shape.head_dim
    sizes = {"q": (shape.query_heads, shape.head_dim), "k": keys, "v": keys, "gates": (shape.query_heads, 3)}
    return {name: torch.randn(batch, seq_len, *size, **options) for name, size in sizes.items()}


def attend_by(
    backend: Backend,
    inputs: Mapping[str, Tensor],
    config: NSAConfig | None,
    branches: tuple[Branch, ...] = BRANCHES,
    blocks: Tensor | None = None,
) -> Tensor:
    """A backend's gated sum of branches, over given blocks, for the last queries; without a config dense attention."""
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    scale, offset = q.shape[-1] ** -0.5, k.shape[1] - q.shape[1]
    if config is None:
        return backend.window(q, k, v, None, k.shape[1], scale)
    cmp, slc, win = torch.sigmoid(inputs["gates"]).unbind(-1)
    parts = []
    if "cmp" in branches:
        parts.append(backend.compressed(q, compress(k, config), compress(v, config), cmp, config, offset, scale))
    if "slc" in branches:
        assert blocks is not None, "they are selected with the selected branch"
        parts.append(backend.selected(q, k, v, slc, blocks, config, scale))
    if "win" in branches:
        parts.append(backend.window(q, k, v, win, config.window, scale))
    return sum(parts[1:], parts[0])


@lru_cache(maxsize=64)
def check_attention(
    implementation: str,
    config: NSAConfig,
    shape: HeadsSpec,
    dtype: torch.dtype,
    device: torch.device,
    *,
    backward: bool,
    seed: int,
    branches: tuple[Branch, ...] = BRANCHES,
) -> Agreement:
    """`check_operator` of an implementation of this project.

    Cached, so that a warm process checks each configuration once. A learned compression needs a layer: check_model
    tests it, the mean replaces it here.
    """
    operator = Operator.of(implementation, replace(config, compress="mean"), branches)
    return check_operator(operator, shape, dtype, device, backward=backward, seed=seed)


def check_operator(
    operator: Operator, shape: HeadsSpec, dtype: torch.dtype, device: torch.device, *, backward: bool, seed: int
) -> Agreement:
    """Compare an operator with the oracle, on two sequences of at most two kv heads and one block more than a query
    selects, and its choice of blocks on a longer sequence.

    Raises WrongResult: the error of the selection, the output or a gradient exceeds its bound.
    """
    config, blocks = operator.computes or NSAConfig(), None
    small, seq_len = small_case(config, shape)
    inputs = make_inputs(small, _SEQUENCES, seq_len, dtype, device, seed, backward)
    if operator.computes is None:
        del inputs["gates"]
    if operator.selects:
        length = REACHES * config.slc_count * config.slc_block
        check_choice(operator, config, make_inputs(small, 1, length, dtype, device, seed, False))
        blocks = operator.choose(inputs)
    wide = {name: x.detach().double().requires_grad_(backward) for name, x in inputs.items()}
    leaves, what = inputs if backward else {}, (operator.computes, operator.branches, blocks)
    truth = _results("output", lambda: attend_by(BACKENDS["reference"], wide, *what), wide if backward else {})
    eager = _results("output", lambda: attend_by(BACKENDS["naive"], inputs, *what), leaves)
    got = _results("output", lambda: operator.attend(inputs), leaves)
    case = f"{_SEQUENCES} sequences, S={seq_len}, {small}"
    return judge(got, eager, truth, dtype, case, operator.name, operator.factor)


def check_choice(operator: Operator, config: NSAConfig, inputs: Mapping[str, Tensor]) -> None:
    """Compare an operator's choice for a sequence with float64's, but for ties. Raises WrongResult.

    The share of wrong ones is also taken over the queries that see more blocks than they select.
    """
    blocks = operator.choose(inputs)
    queries = choices(blocks, inputs["q"], compress(inputs["k"], config), config, 0)
    wrong = torch.tensor([not chooses_alike(*query, tie=operator.tie) for query in queries]).float()
    late = wrong[config.slc_count * config.slc_block * blocks.shape[2] :]
    share = max(late.mean().item(), wrong.mean().item())
    if share > MISMATCH:
        raise WrongResult(
            f"{operator.name}: selects other blocks than the oracle for {share:.1%} of the queries; at most "
            f"{MISMATCH:.1%} can be rounding"
        )


def choices(
    blocks: Tensor, q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int
) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """For each row of one sequence's queries q from `offset` on, and each kv head: its blocks [1,rows,Hkv,n],
    float64's, and float64's ranks of all blocks."""
    args = q.double(), k_cmp.double(), config, offset, q.shape[-1] ** -0.5
    sides = blocks[0], naive.select(*args)[0], naive.block_ranks(*args).transpose(0, 1)
    return zip(*(side.flatten(0, 1).tolist() for side in sides), strict=True)


def chooses_alike(chosen: Sequence[int], best: Sequence[int], ranks: Sequence[float], tie: float) -> bool:
    """Whether blocks of a query are the best ones, or others whose ranks are within `tie` of theirs; -1 pads both."""
    taken, missed = {*chosen} - {*best}, {*best} - {*chosen}
    if sorted({*chosen} - {-1}) + [-1] * list(chosen).count(-1) != list(chosen) or len(taken) != len(missed):
        return False  # not ascending, twice, or too few
    if not taken:
        return True
    return -1 not in taken | missed and min(ranks[i] for i in taken) >= (1 - tie) * max(ranks[i] for i in missed)


@lru_cache(maxsize=64)
def check_model(
    implementation: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, backward: bool, seed: int
) -> Agreement:
    """Compare loss and gradients of two layers of the model with the same in float64 on the reference backend.

    Cached. Raises WrongResult: the error of the loss or of a parameter's gradient exceeds its bound.
    """
    small = replace(config, layers=min(config.layers, 2), checkpointing=False)
    oracle = small if implementation == "dense" else replace(small, backend="reference")
    seq_len = config.nsa.slc_count * config.nsa.slc_block  # rounding cannot change which blocks are selected
    torch.manual_seed(seed)
    weights = NSATransformer(oracle).to(device, dtype).state_dict()
    tokens = torch.randint(config.vocab_size, (1, seq_len + 1), device=device)
    naive = oracle if implementation == "dense" else replace(small, backend="naive")
    sides = []
    for shape, precision in ((small, dtype), (naive, dtype), (oracle, torch.float64)):
        model = NSATransformer(shape).to(device, precision)
        model.load_state_dict(weights)
        leaves = dict(model.named_parameters()) if backward else {}
        sides.append(_results("loss", partial(model, tokens[:, :-1], tokens[:, 1:]), leaves))
    got, eager, truth = sides
    return judge(got, eager, truth, dtype, f"loss of {small.layers} layers, S={seq_len}", implementation)


def judge(
    got: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    dtype: torch.dtype,
    case: str,
    implementation: str,
    factor: float = 2,
) -> Agreement:
    """Agreement of the tensor in `got` whose error is largest relative to its bound, `factor` times eager's error.

    Raises WrongResult: a tensor's error exceeds its bound, or is not finite.
    """
    rounding = torch.finfo(dtype).eps / 2
    floor = 32 * rounding if dtype == torch.float32 else rounding  # sums are long, in any order
    found = {}
    for name, exact in truth.items():
        largest, errors = exact.abs().max().item(), []
        for x in (got[name], eager[name]):  # infinite if a number is not finite
            difference = (x.double() - exact).abs().nan_to_num(torch.inf, torch.inf).max().item()
            errors.append(difference / largest if largest > 0 else difference)
        found[name] = Agreement(errors[0], min(factor * errors[1] + floor, CEILING[dtype]), case, factor)
    worst, agreement = max(found.items(), key=lambda item: item[1].error / item[1].bound)
    if not agreement.error <= agreement.bound:
        raise WrongResult(
            f"{implementation}: {worst} is off by {agreement.error:.2e} of the oracle's largest value ({case}); "
            f"at most {agreement.bound:.2e} is right"
        )
    return agreement


def small_case(config: NSAConfig, shape: HeadsSpec) -> tuple[HeadsSpec, int]:
    """Heads and length to compare at: at most two kv heads, and one block more than a query selects."""
    kv_heads = min(shape.kv_heads, 2)
    query_heads = kv_heads * (shape.query_heads // shape.kv_heads)
    heads = shape.model_copy(update={"query_heads": query_heads, "kv_heads": kv_heads})
    return heads, (config.slc_count + 1) * config.slc_block + config.cmp_stride // 2 + 1


def _results(name: str, call: Callable[[], Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A "loss", which depends on all leaves, or an "output"; with leaves also the gradients of a weighted sum of it."""
    with torch.set_grad_enabled(bool(leaves)):
        out = call()
    if not leaves:
        return {name: out}
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out) if out.ndim else None
    grads = torch.autograd.grad(out, list(leaves.values()), weights, allow_unused=name == "output")
    named = {f"gradient of {leaf}": grad for leaf, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {name: out.detach(), **named}
