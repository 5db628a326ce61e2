"""The stages put together: the gated sum of any of the branches and its gradients, as plain functions of tensors.

Autograd and torch.compile meet them in `operators.py`. Shapes of all results follow from shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..config import NSAConfig
from . import compress, merge, scores
from .merge import Rows, Slots
from .plan import Part, Plan
from .runtime.tiles import ceil_div
from .selected import inverse
from .selected import kernels as selected
from .selected.inverse import Inverse
from .shared import packed_slots as packed
from .span import backward_kv as span_keys
from .span import backward_q as span_queries
from .span import forward as span

__all__ = ["backward", "forward", "select"]


def forward(
    plan: Plan, blocks: Tensor | None, q: Tensor, gates: Tensor, flat: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Σ over the plan's branches of gate · attention, [B,S,HQ,DV], and what `backward` needs of it.

    Args:
        blocks: selected blocks; None with both cmp and slc among the branches: they are chosen here, and the
            compressed branch's log-sum-exp is not computed twice.
        q: [B,S,HQ,D], contiguous as all tensors here.
        gates: [B,S,HQ,len(branches)], not negative.
        flat: keys and values of each pair in turn, compressed ones for cmp unless the plan compresses.
    """
    made = compress.forward(*flat, plan.config) if plan.compresses else ()
    parts = plan.parts([*made, *flat])
    outputs, lses = span.forward(q, parts, plan, None if plan.keeps else gates)
    out = torch.empty_like(outputs[0])
    skip = plan.causal_rows(q.shape[1])
    if not plan.chooses(q.shape[1]):
        merge.gated_sum(outputs, gates, out, Rows(q.shape[2], 0, q.shape[1], 0, q.shape[0] * q.shape[1]))
        return out, [*made, *outputs, *lses] if plan.keeps else []
    if blocks is None:
        cmp = plan.branches.index("cmp")
        blocks = scores.select(q, parts[cmp].k, lses[cmp], plan.config, plan.offset, plan.scale, skip)
    if skip:
        merge.gated_sum(outputs, gates, out, Rows(q.shape[2], 0, skip, 0, q.shape[0] * skip))
    way = plan.branches.index("slc")
    index = _invert(q, parts[way], blocks, plan)
    for chunk, slots in enumerate(_slots(q, parts[way], index, plan)):
        selected.forward_chunk(q, parts[way], slots, index, chunk, plan)
        merge.gated_sum_with_slots(outputs, way, lses[way], gates, out, slots, plan.keeps)
    return out, [*made, *outputs, *lses, *index.tensors()] if plan.keeps else []


def backward(
    plan: Plan, q: Tensor, gates: Tensor, flat: Sequence[Tensor], saved: Sequence[Tensor], do: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of q, gates and `flat`, from that of the output and from what `forward` saved."""
    made = 2 * plan.compresses
    ways, parts, kept = len(plan.branches), plan.parts([*saved[:made], *flat]), saved[made:]
    dgates, stats = merge.prepare(kept[:ways], kept[ways : 2 * ways], gates, do, plan.shared)
    dq = span_queries.backward_q(q, do, parts, stats, plan)

    def gradients(way: int) -> tuple[Tensor, Tensor]:
        part, wide = parts[way], torch.float32 if plan.compresses else parts[way].k.dtype
        of_part = stats[way:] if plan.shared and part.branch == "slc" else stats[way]
        if part.branch != "slc" or not plan.chooses(q.shape[1]):
            return span_keys.backward_kv(q, do, part, of_part, plan, wide)
        index = Inverse(*kept[2 * ways :], *_sizes(q, part, plan))
        totals = _selected_backward(q, do, part, of_part, index, dq, plan)
        return totals[0].to(wide), totals[1].to(wide)

    if plan.compresses:
        totals = gradients(1)
        compressed = span_keys.compressed_kv(q, do, parts[0], stats[0], plan)
        return dq, dgates, list(compress.gather(totals, compressed, plan.config, q.dtype))
    return dq, dgates, [x for way in range(plan.pairs) for x in gradients(way)]


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, int32 [B,S,HKV,slc_count], of q [B,S,HQ,D] and k_cmp [B,N,HKV,D]."""
    lse = span.log_sum_exp(q, k_cmp, Plan(config, ("cmp",), offset, scale))
    return scores.select(q, k_cmp, lse, config, offset, scale)


def _invert(q: Tensor, part: Part, blocks: Tensor, plan: Plan) -> Inverse:
    rows, _, of_sequence, cap = _sizes(q, part, plan)
    return inverse.invert(blocks, plan.config, of_sequence, rows, cap, plan.causal_rows(q.shape[1]))


def _sizes(q: Tensor, part: Part, plan: Plan) -> tuple[int, int, int, int]:
    """Of the inverse index: rows of a chunk, keys, selection blocks of a sequence, entries of a work item."""
    batch, tokens, kv_heads, dim = part.k.shape
    free = plan.config.free_blocks
    choosing = batch * kv_heads * (q.shape[1] - plan.causal_rows(q.shape[1]))
    chunks = ceil_div(choosing, selected.slot_rows(q, kv_heads, max(dim, part.v.shape[-1]), free))
    rows, of_sequence = ceil_div(choosing, chunks), plan.config.slc_blocks(tokens)
    return rows, batch * kv_heads * of_sequence, of_sequence, selected.item_entries(q, kv_heads, free, rows)


def _slots(q: Tensor, part: Part, index: Inverse, plan: Plan, *do: Tensor) -> Iterator[Slots]:
    """The slots of each chunk of rows in turn, in the same memory: for outputs, or with `do` for parts of dq."""
    kv_heads, dim = (part.k if do else part.v).shape[2:]
    shape = index.rows, plan.config.free_blocks, q.shape[2] // kv_heads
    lse, exponents = q.new_empty(shape, dtype=torch.float32), None
    if selected.is_for_hopper(q, part, plan.config, *do):
        parts, exponents = (q.new_empty(size, dtype=torch.int32) for size in ((*shape, packed.WORDS), shape))
    else:
        parts = q.new_empty(*shape, dim)
    skip = plan.causal_rows(q.shape[1])
    length = q.shape[1] - skip
    choosing = q.shape[0] * kv_heads * length
    for first in range(0, choosing, index.rows):
        yield Slots(parts, exponents, lse, Rows(shape[-1], skip, length, first, min(index.rows, choosing - first)))


def _selected_backward(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, index: Inverse, dq: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v in float32, for `stats` as in span_keys.backward_kv; that of q is added to dq."""
    totals = span_keys.backward_kv(q, do, part, stats, plan, torch.float32)
    dk_parts, dv_parts = (x.new_empty(index.limit, plan.config.slc_block, x.shape[-1]) for x in totals)
    own = stats[0] if plan.shared else stats
    for chunk, slots in enumerate(_slots(q, part, index, plan, do)):
        selected.backward_chunk(q, do, part, own, slots, totals, (dk_parts, dv_parts), index, chunk, plan)
        merge.sum_dq(slots, dq)
    return totals
