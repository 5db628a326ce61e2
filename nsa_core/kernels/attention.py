"""The door to the stages, called by operators.py and warm.py: the gated sum of any branches, and its gradients.

Takes contiguous tensors and a call; gives plain tensors, `forward` also those that `backward` needs. The shapes of all
results follow from shapes alone. Knows neither autograd nor torch.compile (operators.py), and holds no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import compress, merge, scores
from .call import Call, Part
from .merge import Rows, Slots
from .selected.inverse import Inverse, inverse_sizes, invert, unwritten
from .selected.kernels import backward_chunk, forward_chunk, is_for_hopper
from .shared.packed_slots import WORDS
from .span.backward_kv import backward_kv, compressed_kv
from .span.backward_q import backward_q
from .span.forward import attend_spans


def forward(
    call: Call, blocks: Tensor | None, q: Tensor, gates: Tensor, flat: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Σ over the branches of gate · attention, [B,S,HQ,DV], and the tensors that `backward` needs.

    Args:
        blocks: selected blocks, int32 [B,S,HKV,slc_count]. None if cmp and slc are among the branches: they are then
            chosen here, from the compressed branch's log-sum-exp.
        q: [B,S,HQ,D], contiguous as all tensors here.
        gates: [B,S,HQ,len(branches)], not negative.
        flat: keys and values of each pair in turn, compressed ones for cmp unless the call compresses.
    """
    made = compress.forward(*flat, call) if call.compresses else ()
    parts = call.parts([*made, *flat])
    outputs, lses = attend_spans(q, parts, call, None if call.keeps else gates)
    out = torch.empty_like(outputs[0])
    skip = call.causal_rows(q.shape[1])
    if not call.chooses(q.shape[1]):
        merge.gated_sum(outputs, gates, out, Rows(q.shape[2], 0, q.shape[1], 0, q.shape[0] * q.shape[1]))
        return out, [*made, *outputs, *lses, *unwritten(q, parts, call)] if call.keeps else []
    if blocks is None:
        cmp = call.branches.index("cmp")
        blocks = scores.select(q, parts[cmp].k, lses[cmp], call, skip)
    if skip and not call.packed:
        merge.gated_sum(outputs, gates, out, Rows(q.shape[2], 0, skip, 0, q.shape[0] * skip))
    way = call.branches.index("slc")
    index = invert(q, parts[way], blocks, call)
    for chunk, slots in enumerate(_slots(q, parts[way], index, call)):
        forward_chunk(q, parts[way], slots, index, chunk, call)
        merge.gated_sum(outputs, gates, out, slots.rows, slots, way, lses[way], call)
    if not call.keeps:
        return out, []
    return out, [*made, *outputs, *lses, index.entries, index.bounds, index.pieces, index.items]


def backward(
    call: Call, q: Tensor, gates: Tensor, flat: Sequence[Tensor], saved: Sequence[Tensor], do: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of q, of gates, and of each of `flat`; empty tensors for those that the call does not need.

    Args:
        q, gates, flat: as in `forward`.
        saved: the tensors that `forward` returned.
        do: gradient of the output, [B,S,HQ,DV].
    """
    made = 2 * call.compresses
    ways, parts, kept = len(call.branches), call.parts([*saved[:made], *flat]), saved[made:]
    dgates, stats = merge.prepare(kept[:ways], kept[ways : 2 * ways], gates, do, call.shared)
    dq = backward_q(q, do, parts, stats, call) if call.of_q else q.new_empty(0)

    def gradients(way: int) -> tuple[Tensor, Tensor]:
        part, wide = parts[way], torch.float32 if call.compresses else parts[way].k.dtype
        of_part = stats[way:] if call.shared and part.branch == "slc" else stats[way]
        if part.branch != "slc" or not call.chooses(q.shape[1]):
            return backward_kv(q, do, part, of_part, call, wide) if call.of_keys else (dq, dq)
        index = Inverse(*kept[2 * ways :], *inverse_sizes(q, part, call))
        totals = _selected_backward(q, do, part, of_part, index, dq, call)
        return (totals[0].to(wide), totals[1].to(wide)) if totals else (dq, dq)

    if not call.of_keys:
        if call.of_q and "slc" in call.branches:
            gradients(call.branches.index("slc"))  # adds to dq
        return dq, dgates, [q.new_empty(0) for _ in flat]
    if call.compresses:
        totals = gradients(1)
        compressed = compressed_kv(q, do, parts[0], stats[0], call)
        return dq, dgates, list(compress.backward(compressed, flat[0].shape[1], q.dtype, call, totals))
    return dq, dgates, [x for way in range(call.pairs) for x in gradients(way)]


def kept(call: Call, q: Tensor, flat: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like those that `forward` keeps, unwritten: their sizes are formulas of its arguments' sizes."""
    if not call.keeps:
        return []
    made = compress.compressed_like(*flat, call) if call.compresses else ()
    parts = call.parts([*made, *flat])
    outputs = [q.new_empty(*q.shape[:3], part.v.shape[-1]) for part in parts]
    lses = [q.new_empty(q.shape[:3], dtype=torch.float32) for _ in parts]
    return [*made, *outputs, *lses, *unwritten(q, parts, call)]


def _slots(q: Tensor, part: Part, index: Inverse, call: Call, *do: Tensor) -> Iterator[Slots]:
    """Slots of each chunk of rows in turn, in the same memory: for outputs or, with `do`, for parts of dq."""
    kv_heads, dim = (part.k if do else part.v).shape[2:]
    shape = index.rows, call.config.free_blocks, q.shape[2] // kv_heads
    lse, exponents = q.new_empty(shape, dtype=torch.float32), None
    if is_for_hopper(q, part, call.config, *do):
        parts, exponents = (q.new_empty(size, dtype=torch.int32) for size in ((*shape, WORDS), shape))
    else:
        parts = q.new_empty(*shape, dim)
    skip = call.skipped(q.shape[1])
    length = q.shape[1] - skip
    choosing = q.shape[0] * kv_heads * length
    for first in range(0, choosing, index.rows):
        yield Slots(parts, exponents, lse, Rows(shape[-1], skip, length, first, min(index.rows, choosing - first)))


def _selected_backward(
    q: Tensor, do: Tensor, part: Part, stats: Tensor, index: Inverse, dq: Tensor, call: Call
) -> tuple[Tensor, Tensor] | None:
    """Gradients of k and v in float32, if they are needed; adds the gradient of q to dq.

    Args:
        stats: as in `backward_kv`.
    """
    totals = backward_kv(q, do, part, stats, call, torch.float32) if call.of_keys else None
    shape = index.limit, call.config.slc_block
    dk_parts, dv_parts = (q.new_empty(*shape, x.shape[-1], dtype=torch.float32) for x in (part.k, part.v))
    own = stats[0] if call.shared else stats
    for chunk, slots in enumerate(_slots(q, part, index, call, do)):
        backward_chunk(q, do, part, own, slots, totals, (dk_parts, dv_parts), index, chunk, call)
        if call.of_q:
            merge.sum_dq(slots, dq, call)
    return totals
