# pyright: reportMissingImports=false
"""The stages put together: the gated sum of any of the branches and its gradients, as plain functions of tensors.

Autograd and torch.compile meet them in `operators.py`. Shapes of all results follow from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import NSAConfig
from ..routes import Branch
from . import inverse, merge, ranges, scores, selected, span, span_keys
from .inverse import Inverse
from .merge import Rows, Slots
from .ranges import Span
from .span import Part

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
        """Rows of q that select every block up to their own: they choose nothing."""
        return min(max(0, self.config.slc_count * self.config.slc_block - self.offset), q.shape[1])

    def chooses(self, q: Tensor) -> bool:
        """Whether any row of q has blocks to choose by score."""
        return "slc" in self.branches and self.config.free_blocks > 0 and self.causal_rows(q) < q.shape[1]

    def parts(self, flat: Sequence[Tensor]) -> list[Part]:
        """The branches' keys and values, with what is dense of each branch."""
        pairs = zip(self.branches, flat[::2], flat[1::2], strict=True)
        return [Part(branch, _SPANS[branch](self.config), k, v) for branch, k, v in pairs]


_SPANS: Mapping[Branch, Callable[[NSAConfig], Span]] = {
    "cmp": ranges.compressed,
    "win": ranges.window,
    "slc": ranges.forced,
}


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
    parts = plan.parts(flat)
    outputs, lses = zip(*span.forward(q, parts, plan.offset, plan.scale), strict=True)
    out = torch.empty_like(outputs[0])
    if not plan.chooses(q):
        merge.gated_sum(outputs, gates, out, Rows(0, q.shape[1], 0, q.shape[0] * q.shape[1]))
        return out, [*outputs, *lses]
    skip = plan.causal_rows(q)
    if blocks is None:
        cmp = plan.branches.index("cmp")
        blocks = scores.select(q, parts[cmp].k, lses[cmp], plan.config, plan.offset, plan.scale, skip)
    if skip:
        merge.gated_sum(outputs, gates, out, Rows(0, skip, 0, q.shape[0] * skip))
    way = plan.branches.index("slc")
    index = _invert(q, parts[way], blocks, plan)
    for chunk, slots in enumerate(_slots(q, parts[way].v, index, plan)):
        selected.forward_chunk(q, parts[way], slots, index, chunk, plan.config, plan.offset, plan.scale)
        merge.gated_sum_with_slots(outputs, way, lses[way], gates, out, slots)
    return out, [*outputs, *lses, *index.tensors()]


def backward(
    plan: Plan, q: Tensor, gates: Tensor, flat: Sequence[Tensor], saved: Sequence[Tensor], do: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of q, gates and `flat`, from that of the output and from what `forward` saved."""
    ways, parts = len(plan.branches), plan.parts(flat)
    dgates, stats = merge.prepare(saved[:ways], saved[ways : 2 * ways], gates, do)
    dq = span.backward_q(q, do, parts, stats, plan.offset, plan.scale)
    grads: list[Tensor] = []
    for part, of_part in zip(parts, stats, strict=True):
        given = q, do, part, of_part
        if part.branch == "slc" and plan.chooses(q):
            index = Inverse(*saved[2 * ways :], *_sizes(q, part, plan))
            grads += _selected_backward(*given, index, dq, plan)
        else:
            grads += span_keys.backward_kv(*given, plan.offset, plan.scale, part.k.dtype)
    return dq, dgates, grads


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count], of q [B,S,HQ,D] and k_cmp [B,N,HKV,D]."""
    lse = span.log_sum_exp(q, k_cmp, ranges.compressed(config), offset, scale)
    return scores.select(q, k_cmp, lse, config, offset, scale)


def _invert(q: Tensor, part: Part, blocks: Tensor, plan: Plan) -> Inverse:
    rows, _, of_sequence, cap = _sizes(q, part, plan)
    return inverse.invert(blocks, plan.config, of_sequence, rows, cap, plan.causal_rows(q))


def _sizes(q: Tensor, part: Part, plan: Plan) -> tuple[int, int, int, int]:
    """Of the inverse index: choosing rows a chunk, keys, selection blocks of a sequence, entries of a work item."""
    batch, tokens, kv_heads, dim = part.k.shape
    free = plan.config.free_blocks
    choosing = batch * (q.shape[1] - plan.causal_rows(q))
    rows = min(choosing, selected.slot_rows(q, max(dim, part.v.shape[-1]), free))
    of_sequence = plan.config.slc_blocks(tokens)
    return rows, batch * kv_heads * of_sequence, of_sequence, selected.item_entries(q, kv_heads, free, rows)


def _slots(q: Tensor, of: Tensor, index: Inverse, plan: Plan) -> Iterator[Slots]:
    """The slots of each chunk of queries in turn, for parts as wide as `of` [..,HKV,D], in the same memory."""
    kv_heads, dim = of.shape[2:]
    shape = index.rows, kv_heads, plan.config.free_blocks, q.shape[2] // kv_heads
    parts, lse = q.new_empty(*shape, dim), torch.empty(shape, dtype=torch.float32, device=q.device)
    skip = plan.causal_rows(q)
    length = q.shape[1] - skip
    for first in range(0, q.shape[0] * length, index.rows):
        yield Slots(parts, lse, Rows(skip, length, first, min(index.rows, q.shape[0] * length - first)))


def _selected_backward(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, index: Inverse, dq: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v; that of q from the free blocks is added to dq."""
    config, offset, scale = plan.config, plan.offset, plan.scale
    totals = span_keys.backward_kv(q, do, part, stats, offset, scale, torch.float32)
    dk_parts, dv_parts = (x.new_empty(index.limit, config.slc_block, x.shape[-1]) for x in totals)
    for chunk, slots in enumerate(_slots(q, part.k, index, plan)):
        scratch, where = (dk_parts, dv_parts), (config, offset, scale)
        selected.backward_chunk(q, do, part, stats, slots, totals, scratch, index, chunk, *where)
        merge.sum_dq(slots, dq)
    return totals[0].to(part.k.dtype), totals[1].to(part.v.dtype)
