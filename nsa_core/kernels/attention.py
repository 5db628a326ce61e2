# pyright: reportMissingImports=false
"""The stages put together: one differentiable operator for any of the branches, their gates merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..config import NSAConfig
from ..routes import Branch
from . import inverse, merge, scores, selected, span
from .compress import compress
from .inverse import Inverse
from .ranges import Span

__all__ = ["Plan", "attend", "compress", "select"]


@dataclass(frozen=True)
class Plan:
    """What does not depend on the tensors' values.

    Attributes:
        config: sizes and counts.
        branches: those computed, in the order of the keys and values and of the gates' columns.
        offset: position of q's first row.
        scale: of q·k.
    """

    config: NSAConfig
    branches: tuple[Branch, ...]
    offset: int
    scale: float

    def causal_rows(self, q: Tensor) -> int:
        """Rows of q that select every block up to their own: their selected attention is causal attention."""
        return min(max(0, self.config.slc_count * self.config.slc_block - self.offset), q.shape[1])

    def span(self, branch: Branch, q: Tensor) -> Span | None:
        """Which keys the queries see, or None where they have to be looked up in the selected blocks."""
        if branch == "cmp":
            return Span(self.config.cmp_block, self.config.cmp_stride)
        if branch == "win":
            return Span(window=self.config.window)
        return Span() if self.causal_rows(q) == q.shape[1] else None


def attend(
    q: Tensor, gates: Tensor | None, blocks: Tensor | None, pairs: list[tuple[Tensor, Tensor]], plan: Plan
) -> Tensor:
    """Σ over the plan's branches of gate · attention, [B,S,HQ,DV], differentiable in q, gates, keys and values.

    Args:
        q: [B,S,HQ,D].
        gates: [B,S,HQ,len(branches)], not negative; None stands for ones.
        blocks: selected blocks; None with both cmp and slc among the branches: they are chosen here, and the
            compressed branch's log-sum-exp is not computed twice.
        pairs: keys and values of each branch, compressed ones for cmp.
    """
    if gates is None:
        gates = q.new_ones(*q.shape[:3], len(plan.branches))
    if plan.scale <= 0:  # the kernels take the largest score before they scale it
        q, plan = q * _sign(plan.scale), replace(plan, scale=abs(plan.scale) or 1.0)
    flat = [x.contiguous() for pair in pairs for x in pair]
    out = _Attend.apply(plan, blocks, q.contiguous(), gates.contiguous(), *flat)
    assert isinstance(out, Tensor)
    return out


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count]."""
    if scale <= 0:
        q, scale = q * _sign(scale), abs(scale) or 1.0
    q, k_cmp = q.contiguous(), k_cmp.contiguous()
    _, lse = span.forward(q, k_cmp, None, Span(config.cmp_block, config.cmp_stride), offset, scale)
    return scores.select(q, k_cmp, lse, config, offset, scale)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, blocks: Tensor | None, q: Tensor, gates: Tensor, *flat: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        lses: list[Tensor] = []
        index = None
        for branch, (k, v) in zip(plan.branches, _pairs(flat), strict=True):
            keys = plan.span(branch, q)
            if keys is not None:
                o, lse = span.forward(q, k, v, keys, plan.offset, plan.scale)
                assert o is not None
            else:
                if blocks is None:
                    blocks = _select(q, flat, lses, plan)
                index = _invert(q, k, v, blocks, plan)
                o, lse = _selected_forward(q, k, v, blocks, index, plan)
            outputs.append(o)
            lses.append(lse)
        ctx.plan, ctx.index = plan, index
        ctx.save_for_backward(blocks, q, gates, *flat, *outputs, *lses)
        return merge.gated_sum(outputs, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, ways = ctx.plan, len(ctx.plan.branches)
        blocks, q, gates, *rest = ctx.saved_tensors
        flat, outputs, lses = rest[: 2 * ways], rest[2 * ways : 3 * ways], rest[3 * ways :]
        do = do.contiguous()
        dgates, folded, deltas = merge.prepare(outputs, lses, gates, do)
        grads: dict[Branch, tuple[Tensor, Tensor]] = {}
        dqs: list[Tensor] = []
        pairs = dict(zip(plan.branches, _pairs(flat), strict=True))
        for branch in sorted(plan.branches, key="slc".__eq__):  # selected last: its kernel sums the gradients of q
            way, (k, v), keys = plan.branches.index(branch), pairs[branch], plan.span(branch, q)
            given = q, k, v, do, folded[way], deltas[way]
            if keys is not None:
                grads[branch] = span.backward_kv(*given, keys, plan.offset, plan.scale)
                dqs.append(span.backward_q(*given, keys, plan.offset, plan.scale))
            else:
                dq, dk, dv = _selected_backward(*given, blocks, ctx.index, dqs, plan)
                grads[branch], dqs = (dk, dv), [dq]
        return None, None, sum(dqs[1:], dqs[0]), dgates, *(x for branch in plan.branches for x in grads[branch])


def _select(q: Tensor, flat: tuple[Tensor, ...], lses: list[Tensor], plan: Plan) -> Tensor:
    """The selected blocks of all rows that have a choice, by the softmax of the compressed branch."""
    cmp = plan.branches.index("cmp")
    return scores.select(q, flat[2 * cmp], lses[cmp], plan.config, plan.offset, plan.scale, plan.causal_rows(q))


def _pairs(flat: tuple[Tensor, ...] | list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _invert(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, plan: Plan) -> Inverse:
    kv_heads, count = blocks.shape[2:]
    rows = selected.slot_rows(q, max(q.shape[-1], v.shape[-1]), count)
    cap = selected.item_entries(q, kv_heads, count, rows)
    return inverse.invert(blocks, plan.config.slc_blocks(k.shape[1]), rows, cap, plan.causal_rows(q))


def _selected_forward(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, index: Inverse, plan: Plan
) -> tuple[Tensor, Tensor]:
    skip = plan.causal_rows(q)
    o, lse = span.forward(q, k, v, Span(), plan.offset, plan.scale, skip)
    assert o is not None
    parts = q.new_empty(index.rows, q.shape[2] * blocks.shape[3], v.shape[-1])
    lse_parts = torch.empty(parts.shape[:2], dtype=torch.float32, device=q.device)
    for chunk, (first, rows) in enumerate(_row_chunks(q, index)):
        selected.forward_chunk(q, k, v, parts, lse_parts, index, chunk, plan.config, plan.offset, plan.scale)
        merge.merge_slots(parts, lse_parts, blocks, first, rows, skip, o, lse)
    return o, lse


def _selected_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, blocks: Tensor, index: Inverse,
    others: list[Tensor], plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, with those of the other branches added, of k and of v."""
    out, skip = others[0] if others else torch.empty_like(q), plan.causal_rows(q)
    head = span.backward_q(q, k, v, do, lse, delta, Span(), plan.offset, plan.scale, skip)
    totals = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    span.backward_kv_into(q, k, v, do, lse, delta, totals, plan.offset, plan.scale, skip)
    dk_scratch, dv_scratch = (totals[0].new_empty(index.limit, plan.config.slc_block, x.shape[-1]) for x in (k, v))
    scratch = dk_scratch, dv_scratch
    parts = q.new_empty(index.rows, q.shape[2] * blocks.shape[3], q.shape[-1])
    for chunk, (first, rows) in enumerate(_row_chunks(q, index)):
        where = plan.config, plan.offset, plan.scale
        selected.backward_chunk(q, k, v, do, lse, delta, parts, totals, scratch, index, chunk, *where)
        merge.sum_dq(parts, blocks, head, first, rows, others, out)
    return out, totals[0].to(k.dtype), totals[1].to(v.dtype)


def _row_chunks(q: Tensor, index: Inverse) -> list[tuple[int, int]]:
    """(first, count) of the query rows of each chunk, batch and sequence flattened."""
    total = q.shape[0] * q.shape[1]
    return [(first, min(index.rows, total - first)) for first in range(0, total, index.rows)]
