# pyright: reportMissingImports=false
"""The stages put together: the gated sum of any of the branches and its gradients, as plain functions of tensors.

Autograd and torch.compile meet them in `operators.py`. Shapes of all results follow from shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import NSAConfig
from ..routes import Branch
from . import inverse, merge, scores, selected, span
from .inverse import Inverse
from .ranges import Span

__all__ = ["Plan", "backward", "forward", "select"]


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


def forward(
    plan: Plan, blocks: Tensor | None, q: Tensor, gates: Tensor, flat: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Σ over the plan's branches of gate · attention, [B,S,HQ,DV], and what `backward` needs of it.

    Args:
        blocks: selected blocks; None with both cmp and slc among the branches: they are chosen here, and the
            compressed branch's log-sum-exp is not computed twice.
        q: [B,S,HQ,D], contiguous as all tensors here.
        gates: [B,S,HQ,len(branches)], not negative.
        flat: keys and values of each branch in turn, compressed ones for cmp.
    """
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    selection: list[Tensor] = []
    for branch, (k, v) in zip(plan.branches, _pairs(flat), strict=True):
        keys = plan.span(branch, q)
        if keys is not None:
            o, lse = span.forward(q, k, v, keys, plan.offset, plan.scale)
            assert o is not None
        else:
            chosen = _select(q, flat, lses, plan) if blocks is None else blocks
            index = _invert(q, k, v, chosen, plan)
            o, lse = _selected_forward(q, k, v, chosen, index, plan)
            selection = [*index.tensors(), *([chosen] if blocks is None else [])]
        outputs.append(o)
        lses.append(lse)
    return merge.gated_sum(outputs, gates), [*outputs, *lses, *selection]


def backward(
    plan: Plan, blocks: Tensor | None, q: Tensor, gates: Tensor, flat: Sequence[Tensor], saved: Sequence[Tensor],
    do: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of q, gates and `flat`, from that of the output and from what `forward` saved."""
    ways = len(plan.branches)
    outputs, lses, selection = list(saved[:ways]), list(saved[ways : 2 * ways]), list(saved[2 * ways :])
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
            chosen = selection.pop() if blocks is None else blocks
            index = Inverse(*selection, *_sizes(q, k, v, chosen, plan))
            dq, dk, dv = _selected_backward(*given, chosen, index, dqs, plan)
            grads[branch], dqs = (dk, dv), [dq]
    return sum(dqs[1:], dqs[0]), dgates, [x for branch in plan.branches for x in grads[branch]]


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count], of q [B,S,HQ,D] and k_cmp [B,N,HKV,D]."""
    _, lse = span.forward(q, k_cmp, None, Span(config.cmp_block, config.cmp_stride), offset, scale)
    return scores.select(q, k_cmp, lse, config, offset, scale)


def _select(q: Tensor, flat: Sequence[Tensor], lses: list[Tensor], plan: Plan) -> Tensor:
    """The selected blocks of all rows that have a choice, by the softmax of the compressed branch."""
    cmp = plan.branches.index("cmp")
    return scores.select(q, flat[2 * cmp], lses[cmp], plan.config, plan.offset, plan.scale, plan.causal_rows(q))


def _pairs(flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _invert(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, plan: Plan) -> Inverse:
    rows, _, count, cap = _sizes(q, k, v, blocks, plan)
    return inverse.invert(blocks, count, rows, cap, plan.causal_rows(q))


def _sizes(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, plan: Plan) -> tuple[int, int, int, int]:
    """Of the inverse index: query rows of a chunk, its keys, selection blocks of a sequence, entries of a work item."""
    batch, _, kv_heads, count = blocks.shape
    rows = selected.slot_rows(q, max(q.shape[-1], v.shape[-1]), count)
    of_sequence = plan.config.slc_blocks(k.shape[1])
    return rows, batch * kv_heads * of_sequence, of_sequence, selected.item_entries(q, kv_heads, count, rows)


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
