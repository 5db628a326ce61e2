"""Check of a timed call itself: rows of its output and gradients, at the size and on the data that were timed.

A row of the output, and of the gradients of q and the gates, follows from its own query; those of k and v at the last
positions follow from the last queries. So float64 is affordable at any length. All sides attend to the blocks that the
implementation selects from these inputs, which are compared with float64's choice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jobs.measure import check
from jobs.measure.check import DENSE_KERNELS, WrongResult
from jobs.schema.point import Metric
from jobs.schema.quantities import ROWS_ERROR, ROWS_ERROR_BOUND
from nsa_core import NSAConfig, compress, select_blocks
from nsa_core.backends import BACKENDS, Backend
from nsa_core.routes import Branch

_RANDOM = 8  # rows beside those at edges
_LAST = 16  # rows at the end, whose keys and values are checked as well
_OTHER_CHOICES = 0.05  # share of the sampled choices that may differ from float64's: ties of float32
_SMALL = 0.1  # of the largest row


@dataclass(frozen=True)
class _Span:
    """Rows first to end of one sequence, of the query heads of one kv head."""

    sequence: int
    kv_head: int
    first: int
    end: int


class RowCheck:
    """Takes rows of a call's results, and judges the last ones taken.

    Args:
        inputs: q, k, v and, but for dense attention, gate logits of the call (`check.make_inputs`).
        towards: the gradient of the output; None of a forward pass.
    """

    def __init__(
        self,
        implementation: str,
        config: NSAConfig,
        branches: tuple[Branch, ...],
        inputs: Mapping[str, Tensor],
        towards: Tensor | None,
        seed: int,
    ) -> None:
        self._implementation = implementation
        self._config = config
        self._branches = branches
        self._inputs = inputs
        self._towards = towards
        self._group = inputs["q"].shape[2] // inputs["k"].shape[2]
        self._generator = torch.Generator(inputs["q"].device).manual_seed(seed + 2)
        batch, length, kv_heads, _ = inputs["k"].shape
        self._spans = _spans(config, batch, length, kv_heads, seed)
        self._taken: list[dict[str, Tensor]] = []

    def renew(self) -> None:
        """Draw queries that no earlier call had, in the same memory."""
        self._inputs["q"].detach().normal_(generator=self._generator)

    def take(self, result: Any) -> None:
        """Copy the rows of a result as the present stream sees them."""
        out, grads = result if self._towards is not None else (result, ())
        named = {"output": out}
        named |= {f"gradient of {name}": grad for name, grad in zip(self._inputs, grads, strict=False)}
        taken = []
        for span in self._spans:
            rows = {name: self._rows(x, span) for name, x in named.items() if x is not None}
            taken.append({name: x.detach().clone() for name, x in rows.items() if x is not None})
        self._taken = taken

    def judge(self) -> tuple[Metric, Metric]:
        """Error and bound of the last rows taken, as metrics. Raises WrongResult."""
        blocks, implementation = None, self._implementation
        q, k = (self._inputs[name].detach() for name in "qk")
        if implementation not in DENSE_KERNELS and "slc" in self._branches:
            blocks = select_blocks(q, k, self._config, backend=implementation)
            self._judge_choices(blocks)
        got, eager, truth = ({}, {}, {})
        for span, rows in zip(self._spans, self._taken, strict=True):
            chosen = None if blocks is None else blocks[span.sequence, None, span.first : span.end, span.kv_head, None]
            exact = self._compute(span, torch.float64, chosen)
            plain = self._compute(span, q.dtype, chosen)
            for name, row in exact.items():
                if name in rows:  # other keys than the last get gradients from queries that are not computed
                    for side, x in ((got, rows[name]), (eager, plain[name]), (truth, row)):
                        side.setdefault(name, []).append(x.double().reshape(span.end - span.first, -1))
        sides = [{name: torch.cat(rows) for name, rows in side.items()} for side in (got, eager, truth)]
        scales = {name: _scale(rows, gradient=name != "output") for name, rows in sides[2].items()}
        got, eager, truth = ({name: x / scales[name] for name, x in side.items()} for side in sides)
        where = f"{len(truth['output'])} rows of q {tuple(q.shape)}"
        agreement = check.judge(got, eager, truth, q.dtype, where, implementation)
        how = f"max |x - float64| / max |float64| of a row, {where}, of the last timed call, whose queries no other had"
        return (
            Metric.of(ROWS_ERROR, agreement.error, method=how),
            Metric.of(
                ROWS_ERROR_BOUND, agreement.bound, method="2 times an eager run's of the same rows, plus a floor"
            ),
        )

    def _heads(self, span: _Span) -> slice:
        return slice(span.kv_head * self._group, (span.kv_head + 1) * self._group)

    def _rows(self, x: Tensor, span: _Span) -> Tensor | None:
        """The span's part of an output or a gradient; None of a key's or a value's that is not its queries' alone."""
        if x.shape[2] == self._inputs["q"].shape[2]:
            return x[span.sequence, span.first : span.end, self._heads(span)]
        last = span.end == x.shape[1] and span.end - span.first == min(_LAST, x.shape[1])
        return x[span.sequence, span.first : span.end, span.kv_head] if last else None

    def _compute(self, span: _Span, dtype: torch.dtype, blocks: Tensor | None) -> dict[str, Tensor]:
        """Output and gradients of a span's rows by plain matrix products in a dtype; those of k and v of all keys."""
        sequence, rows = slice(span.sequence, span.sequence + 1), slice(span.first, span.end)
        kv_head = slice(span.kv_head, span.kv_head + 1)
        parts = {
            name: x[sequence, : span.end, kv_head] if name in "kv" else x[sequence, rows, self._heads(span)]
            for name, x in self._inputs.items()
        }
        parts = {name: x.detach().to(dtype).requires_grad_(self._towards is not None) for name, x in parts.items()}
        plain: Backend = BACKENDS["naive"]
        with torch.set_grad_enabled(self._towards is not None):
            if self._implementation in DENSE_KERNELS:
                out = check.attend_densely(parts, plain)
            else:
                out = check.attend_to(blocks, parts, self._config, plain, self._branches)
        found = {"output": out.detach()}
        if self._towards is not None:
            towards = self._towards[sequence, rows, self._heads(span)].to(dtype)
            grads = torch.autograd.grad(out, list(parts.values()), towards, allow_unused=True)
            for name, grad in zip(parts, grads, strict=True):
                if grad is not None:
                    found[f"gradient of {name}"] = grad[:, span.first :] if name in "kv" else grad
        return found

    def _judge_choices(self, blocks: Tensor) -> None:
        """Compare the selected blocks of the sampled rows with float64's choice. Raises WrongResult."""
        differ, number = 0, 0
        for span in self._spans:
            sequence, kv_head = slice(span.sequence, span.sequence + 1), slice(span.kv_head, span.kv_head + 1)
            q = self._inputs["q"].detach()[sequence, span.first : span.end, self._heads(span)].double()
            keys = compress(self._inputs["k"].detach()[sequence, : span.end, kv_head].double(), self._config)
            exact = BACKENDS["naive"].select(q, keys, self._config, span.first, q.shape[-1] ** -0.5)
            ours = blocks[sequence, span.first : span.end, kv_head]
            differ += int((ours != exact).any(-1).sum())
            number += ours.shape[1]
        if differ > max(1, _OTHER_CHOICES * number):
            raise WrongResult(
                f"{self._implementation}: selects other blocks than float64 for {differ} of {number} sampled rows at "
                f"S={blocks.shape[1]}; {_OTHER_CHOICES:.0%} can be ties"
            )


def _scale(rows: Tensor, *, gradient: bool) -> Tensor:
    """The largest number of each row [N,1], to which its error is relative; of a small gradient that of all rows: what
    cancels, as in the first row, leaves the rounding of its terms."""
    own = rows.abs().amax(1, keepdim=True)
    most = own.max().clamp(min=torch.finfo(rows.dtype).tiny)
    return torch.where(own < (_SMALL if gradient else 0) * most, most, own.clamp(min=torch.finfo(rows.dtype).tiny))


def _spans(config: NSAConfig, batch: int, length: int, kv_heads: int, seed: int) -> list[_Span]:
    """The last rows together; the first, those at edges of blocks and of the window, and random ones alone."""
    draw = random.Random(seed)
    middle = length // 2 // config.slc_block * config.slc_block
    edges = [config.cmp_block - 1, config.slc_block - 1, config.slc_block, middle - 1, middle]
    edges += [config.window - 1, config.window, config.slc_count * config.slc_block]
    rows = {0, *edges, *(draw.randrange(length) for _ in range(_RANDOM))}
    single = [(row, row + 1) for row in sorted(rows) if 0 <= row < length]
    places = [*single, (max(0, length - _LAST), length)]
    first = draw.randrange(kv_heads)
    return [_Span(draw.randrange(batch), (first + n) % kv_heads, *place) for n, place in enumerate(places)]
