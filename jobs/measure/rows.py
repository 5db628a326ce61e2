"""Check of a timed call itself: rows of its output and gradients, at the size and on the data that were timed. What is
timed as a whole model has its attention checked by a call of its own, at the same size.

A row of the output, and of the gradients of q and the gates, follows from its own query; those of k and v at the last
positions follow from the last queries. So float64 is affordable at any length. All sides attend to the blocks that the
implementation, ours or a peer, selects from these inputs, which are compared with float64's choice.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jobs.measure import check
from jobs.measure.check import Agreement, Operator, WrongResult, choices, chooses_alike
from jobs.schema.point import Metric
from jobs.schema.quantities import ROWS_ERROR, ROWS_ERROR_BOUND
from jobs.specs.fields import HeadsSpec
from nsa_core import NSAConfig, compress
from nsa_core.backends import BACKENDS

_RANDOM = 8  # rows beside those at edges
_LAST = 16  # rows at the end, whose keys and values are checked as well
_SMALL = 0.1  # of the largest row


@dataclass(frozen=True)
class _Span:
    """Rows of one sequence, of one kv head and its query heads; only the last rows tell gradients of k and v."""

    sequence: slice
    kv_head: slice
    heads: slice
    rows: slice
    last: bool

    def of(self, name: str, x: Tensor) -> Tensor:
        """The span [1,rows,heads,D] of an input, an output or a gradient."""
        return x[self.sequence, self.rows, self.kv_head if name[-1] in "kv" else self.heads]


class RowCheck:
    """Takes rows of a call's results, and judges the last ones taken.

    The inputs are the call's, without gates of dense attention; `towards` is the gradient of the output, if any.
    """

    def __init__(self, operator: Operator, inputs: Mapping[str, Tensor], towards: Tensor | None, seed: int) -> None:
        self._operator, self._inputs, self._towards = operator, inputs, towards
        self._generator = torch.Generator(inputs["q"].device).manual_seed(seed + 2)
        config = operator.computes or NSAConfig()
        self._spans = _spans(config, inputs["q"].shape[2], inputs["k"].shape, seed)
        self._taken: list[dict[str, Tensor]] = []

    def renew(self) -> None:
        """Draw queries that no earlier call had, in the same memory."""
        self._inputs["q"].detach().normal_(generator=self._generator)

    def take(self, result: Any) -> None:
        """Copy the rows of a result as the present stream sees them."""
        out, grads = result if self._towards is not None else (result, ())
        named = {"output": out, **{f"gradient of {name}": x for name, x in zip(self._inputs, grads, strict=False)}}
        self._taken = [
            {
                name: span.of(name, x).detach().clone()
                for name, x in named.items()
                if x is not None and (span.last or name[-1] not in "kv")
            }
            for span in self._spans
        ]

    def judge(self) -> tuple[Metric, Metric]:
        """Error and bound of the last rows taken, as metrics. Raises WrongResult."""
        operator, q, blocks = self._operator, self._inputs["q"].detach(), None
        if operator.selects:
            blocks = operator.choose(self._inputs)
            self._judge_choices(blocks, operator.computes or NSAConfig())
        sides: list[dict[str, list[Tensor]]] = [{}, {}, {}]  # got, eager, truth
        for span, rows in zip(self._spans, self._taken, strict=True):
            plain, exact = (self._compute(span, dtype, blocks) for dtype in (q.dtype, torch.float64))
            for name, row in ((name, row) for name, row in rows.items() if name in exact):
                for side, x in zip(sides, (row, plain[name], exact[name]), strict=True):
                    side.setdefault(name, []).append(x.double().reshape(row.shape[1], -1))
        got, eager, truth = ({name: torch.cat(rows) for name, rows in side.items()} for side in sides)
        scales = {name: _scale(rows, gradient=name != "output") for name, rows in truth.items()}
        got, eager, truth = ({name: x / scales[name] for name, x in side.items()} for side in (got, eager, truth))
        where = f"{len(truth['output'])} rows of q {tuple(q.shape)}"
        return row_metrics(check.judge(got, eager, truth, q.dtype, where, operator.name, operator.factor))

    def _compute(self, span: _Span, dtype: torch.dtype, blocks: Tensor | None) -> dict[str, Tensor]:
        """Output and gradients of a span's rows by plain matrix products in a dtype."""
        backward = self._towards is not None
        before = {name: self._inputs[name][span.sequence, : span.rows.stop, span.kv_head] for name in "kv"}
        parts = {name: before[name] if name in before else span.of(name, x) for name, x in self._inputs.items()}
        parts = {name: x.detach().to(dtype).requires_grad_(backward) for name, x in parts.items()}
        chosen = None if blocks is None else blocks[span.sequence, span.rows, span.kv_head]
        with torch.set_grad_enabled(backward):
            out = check.attend_by(BACKENDS["naive"], parts, self._operator.computes, self._operator.branches, chosen)
        found = {"output": out.detach()}
        if self._towards is not None:
            towards = span.of("output", self._towards).to(dtype)
            grads = torch.autograd.grad(out, list(parts.values()), towards, allow_unused=True)
            used = ((name, grad) for name, grad in zip(parts, grads, strict=True) if grad is not None)
            found |= {f"gradient of {name}": x[:, span.rows.start :] if name in "kv" else x for name, x in used}
        return found

    def _judge_choices(self, blocks: Tensor, config: NSAConfig) -> None:
        """Hold the selected blocks of the sampled rows against float64's scores. Raises WrongResult."""
        name, tie = self._operator.name, self._operator.tie
        for span in self._spans:
            q, keys = span.of("q", self._inputs["q"].detach()), self._inputs["k"].detach()
            k_cmp = compress(keys[span.sequence, : span.rows.stop, span.kv_head].double(), config)
            queries = choices(span.of("blocks of k", blocks), q, k_cmp, config, span.rows.start)
            for row, (ours, exact, of_row) in enumerate(queries, span.rows.start):
                if not chooses_alike(ours, exact, of_row, tie):
                    raise WrongResult(f"{name}: row {row} of {blocks.shape[1]} selects blocks {ours}, float64 {exact}")


def check_rows(
    operator: Operator, shape: HeadsSpec, batch: int, seq_len: int, dtype: torch.dtype, device: torch.device, *,
    backward: bool, seed: int,
) -> tuple[Metric, Metric]:  # fmt: skip
    """Error and bound of rows of an untimed call, for attention that is timed as a part only. Raises WrongResult."""
    inputs = check.make_inputs(shape, batch, seq_len, dtype, device, seed, backward)
    if operator.computes is None:
        del inputs["gates"]
    towards = inputs["q"].detach().flip(1) if backward else None
    rows = RowCheck(operator, inputs, towards, seed)
    with torch.set_grad_enabled(backward):
        out = operator.attend(inputs)
    rows.take((out, torch.autograd.grad(out, [*inputs.values()], towards, allow_unused=True)) if backward else out)
    del out
    torch.cuda.empty_cache()  # CUDA graphs could not use it
    return rows.judge()


def row_metrics(agreement: Agreement) -> tuple[Metric, Metric]:
    """Error and bound of the rows of a call."""
    how = f"max |x - float64| / max |float64| of a row, {agreement.case}, whose queries no earlier call had"
    bound = f"{agreement.factor:g} times an eager run's of the same rows, plus a floor"
    return (
        Metric.of(ROWS_ERROR, agreement.error, method=how),
        Metric.of(ROWS_ERROR_BOUND, agreement.bound, method=bound),
    )


def _scale(rows: Tensor, *, gradient: bool) -> Tensor:
    """The largest number of each row [N,1], to which its error is relative; of a small gradient that of all rows: what
    cancels, as in the first row, leaves the rounding of its terms."""
    own = rows.abs().amax(1, keepdim=True)
    most = own.max().clamp(min=torch.finfo(rows.dtype).tiny)
    return torch.where(own < (_SMALL if gradient else 0) * most, most, own.clamp(min=torch.finfo(rows.dtype).tiny))


def _spans(config: NSAConfig, query_heads: int, keys: torch.Size, seed: int) -> list[_Span]:
    """The first row, those at edges of blocks and of the window, and random ones alone; the last rows together, of the
    last sequence and heads: where an offset that has outgrown 32 bits is wrong first."""
    batch, length, kv_heads, _ = keys
    group = query_heads // kv_heads
    draw = random.Random(seed)
    middle = length // 2 // config.slc_block * config.slc_block
    edges = [config.cmp_block - 1, config.slc_block - 1, config.slc_block, middle - 1, middle]
    edges += [config.window - 1, config.window, config.slc_count * config.slc_block]
    rows = {0, *edges, *(draw.randrange(length) for _ in range(_RANDOM))}
    places = [slice(row, row + 1) for row in sorted(rows) if 0 <= row < length]
    first, spans = draw.randrange(kv_heads), []
    at = [(draw.randrange(batch), number % kv_heads, place) for number, place in enumerate(places, first)]
    for sequence, head, place in [*at, (batch - 1, kv_heads - 1, slice(max(0, length - _LAST), length))]:
        heads, last = slice(head * group, (head + 1) * group), len(spans) == len(at)
        spans.append(_Span(slice(sequence, sequence + 1), slice(head, head + 1), heads, place, last))
    return spans
