# pyright: reportMissingImports=false
"""Merging and gating: the last step of the forward, and the first and last steps of the backward.

A slot holds the contribution of one chosen block to one (row, head) pair: a partial output with its log-sum-exp in the
forward, a partial gradient of q in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import Call
from .runtime.launch import launch
from .runtime.tiles import Tile, ceil_div, padded
from .shared.packed_slots import add_packed, in_order
from .shared.ranges import sequence_of


@triton.jit
def _place(i, first, length, S, begin, HQ: tl.constexpr, G: tl.constexpr):
    """Index of the i-th (row, head) pair of a `Rows` among all pairs of q."""
    row = first + i // G
    group, row = row // length, begin + row % length
    return (group // (HQ // G) * S + row) * HQ + group % (HQ // G) * G + i % G


@triton.jit
def _chooses(place, ok, CU, sequences, HQ: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr):
    """Which of the pairs `place`, where ok, have slots: of packed sequences with bounds CU those from CAUSAL on."""
    if VARLEN:
        token = tl.where(ok, place // HQ, 0).to(tl.int32)
        _, start, _, _ = sequence_of(CU, sequences, token, 1, 0)
        ok = ok & (token - start >= CAUSAL)
    return ok


@triton.jit
def _slot(i, G: tl.constexpr, FREE: tl.constexpr):
    """Index of the i-th pair's first slot; 32 bits suffice for the numbers of a chunk, 2 GiB at most."""
    return (i // G * FREE * G + i % G).to(tl.int32)


@triton.jit
def _no_slots(M: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr):
    """Zeros for `_add_slots` to accumulate in: [M,WIDTH], or in the layout of packed slots."""
    return tl.zeros([M, WIDTH // 8, 2, 2, 2] if PACKED else [M, WIDTH], tl.float32)


@triton.jit
def _add_slots(total, PARTS, EXPONENTS, slot, weight, ok, d, D: tl.constexpr, PACKED: tl.constexpr):
    """Accumulator `total` plus weight · one slot of each pair."""
    if PACKED:
        total = add_packed(total, PARTS, EXPONENTS, slot, weight, ok)
    else:
        o = tl.load(PARTS + slot[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0)
        total += weight[:, None] * o.to(tl.float32)
    return total


@triton.jit
def _slots_sum(
    PARTS, EXPONENTS, LPARTS, LSE, place, ok, chooses, slot, d,
    G: tl.constexpr, FREE: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    """(Σ weight · slot over FREE ranks in order [M,DVP], weight of the output behind LSE [M], sum of all weights [M]).

    KEEPS: overwrites LSE with the log-sum-exp of output and slots together.
    """
    own = tl.load(LSE + place, mask=ok, other=float("inf"))
    own = tl.where(own == float("inf"), float("-inf"), own)  # no key: no weight
    m = tl.maximum(own, -1e30)
    for rank in range(FREE):
        m = tl.maximum(m, tl.load(LPARTS + slot + rank * G, mask=chooses, other=float("-inf")))
    weight = tl.exp2(own - m)
    l, total = weight, _no_slots(M, DVP, PACKED)
    for rank in range(FREE):
        p = tl.exp2(tl.load(LPARTS + slot + rank * G, mask=chooses, other=float("-inf")) - m)
        l += p
        total = _add_slots(total, PARTS, EXPONENTS, slot + rank * G, p, chooses, d, DV, PACKED)
    if PACKED:
        total = in_order(total, M)
    if KEEPS:
        tl.debug_barrier()  # every warp reads the tile's LSE: wait for all before it is overwritten
        tl.store(LSE + place, tl.where(l > 0, m + tl.log2(l), float("inf")), mask=ok)
    return total, weight, l


@triton.jit
def _merge(
    O1, O2, O3, LSE, PARTS, EXPONENTS, LPARTS, GATES, OUT, CU, total, first, length, S, begin, sequences,
    HQ: tl.constexpr, WAYS: tl.constexpr, SLC: tl.constexpr, G: tl.constexpr, FREE: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr, SUMMED: tl.constexpr, KEEPS: tl.constexpr,
    CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gated sum of the branches' outputs, with the selected branch's slots merged in.

    Grid: (tiles of M (row, head) pairs). A program owns M pairs and all DV columns, merges way SLC (-1: none) with its
    FREE slots, and writes Σ gate · output to OUT. Of three ways the first and third are summed and rounded first;
    SUMMED: O1 holds that sum already. KEEPS: the merged output and LSE of way SLC are written back.
    O1, O2, O3, OUT [B,S,HQ,DV]; LSE [B,S,HQ] float32, base 2; GATES [B,S,HQ,WAYS]; PARTS, EXPONENTS, LPARTS as `Slots`.
    """
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, d, place = i < total, tl.arange(0, DVP), _place(i, first, length, S, begin, HQ, G)
    inside = ok[:, None] & (d < DV)[None, :]
    at = place[:, None] * DV + d[None, :]
    if SLC >= 0:  # before outputs are loaded, which would hold registers meanwhile
        slots, weight, l = _slots_sum(
            PARTS, EXPONENTS, LPARTS, LSE, place, ok, _chooses(place, ok, CU, sequences, HQ, CAUSAL, VARLEN),
            _slot(i, G, FREE), d, G, FREE, DV, DVP, M, PACKED, KEEPS)  # fmt: skip
    out = tl.zeros([M, DVP], tl.float32)
    if SUMMED:
        out = tl.load(O1 + at, mask=inside, other=0.0).to(tl.float32)
    elif WAYS == 3:
        o1, o3 = tl.load(O1 + at, mask=inside, other=0.0), tl.load(O3 + at, mask=inside, other=0.0)
        g1 = tl.load(GATES + place * 3, mask=ok, other=0.0).to(tl.float32)
        g3 = tl.load(GATES + place * 3 + 2, mask=ok, other=0.0).to(tl.float32)
        out = tl.fma(o1.to(tl.float32), tl.broadcast_to(g1[:, None], out.shape), o3.to(tl.float32) * g3[:, None])
        out = out.to(OUT.dtype.element_ty).to(tl.float32)
    for way in tl.static_range(1 if WAYS == 3 else 0, 2 if WAYS == 3 else WAYS):
        source = O1 if way == 0 else O2
        o = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        if way == SLC:
            o = (weight[:, None] * o + slots) * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
            if KEEPS:
                tl.store(source + at, o.to(source.dtype.element_ty), mask=inside)
        out += tl.load(GATES + place * WAYS + way, mask=ok, other=0.0).to(tl.float32)[:, None] * o
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _sum_dq(
    PARTS, EXPONENTS, DQ, CU, total, first, length, S, begin, sequences,
    HQ: tl.constexpr, G: tl.constexpr, FREE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Adds the slots of the selected backward to DQ.

    Grid: (tiles of M (row, head) pairs). A program owns M pairs and all D columns, sums their FREE slots in rank order,
    and adds the sum to DQ [B,S,HQ,D] in place. PARTS, EXPONENTS as `Slots`.
    """
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    d, slot, place = tl.arange(0, DP), _slot(i, G, FREE), _place(i, first, length, S, begin, HQ, G)
    ok, one = i < total, tl.full([M], 1.0, tl.float32)
    chooses = _chooses(place, ok, CU, sequences, HQ, CAUSAL, VARLEN)
    inside = chooses[:, None] & (d < D)[None, :]
    added = _no_slots(M, DP, PACKED)
    for rank in range(FREE):
        added = _add_slots(added, PARTS, EXPONENTS, slot + rank * G, one, chooses, d, D, PACKED)
    if PACKED:
        added = in_order(added, M)
    at = DQ + place[:, None] * D + d[None, :]
    dq = tl.load(at, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(at, dq.to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _prepare(
    O1, O2, O3, LSE1, LSE2, LSE3, GATES, DO, DGATES, STATS, total,
    WAYS: tl.constexpr, SHARED: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Statistics that every branch's backward starts from, and the gates' gradient.

    Grid: (tiles of M (row, head) pairs). A program owns M pairs and all DV columns, and writes (lse - log2 gate, do ·
    o) of each way to STATS [WAYS,B,S,HQ,2] float32, and do · o to DGATES [B,S,HQ,WAYS]. SHARED: STATS has one more
    entry, for the last two ways taken as one: p = p1 + p2 and p (dp - delta) = Σ pi (dp - deltai).
    O1, O2, O3, DO [B,S,HQ,DV]; LSE1, LSE2, LSE3 [B,S,HQ] float32, base 2; GATES [B,S,HQ,WAYS].
    """
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, d = i < total, tl.arange(0, DVP)
    inside = ok[:, None] & (d < DV)[None, :]
    at = i[:, None] * DV + d[None, :]
    do = tl.load(DO + at, mask=inside, other=0.0).to(tl.float32)
    shifted_before, delta_before = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    for way in tl.static_range(WAYS):
        source = O1 if way == 0 else (O2 if way == 1 else O3)
        lse = LSE1 if way == 0 else (LSE2 if way == 1 else LSE3)
        delta = tl.sum(do * tl.load(source + at, mask=inside, other=0.0).to(tl.float32), 1)
        g = tl.load(GATES + i * WAYS + way, mask=ok, other=0.0).to(tl.float32)
        tl.store(DGATES + i * WAYS + way, delta.to(DGATES.dtype.element_ty), mask=ok)
        shifted = tl.load(lse + i, mask=ok, other=0.0) - tl.log2(g)
        to = STATS + (way * tl.cast(total, tl.int64) + i)[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(to, tl.join(shifted, delta), mask=ok[:, None])
        if SHARED and way == WAYS - 1:
            # NaN, of a gate below 0, wins over inf, of a gate of 0, which stands for no gradient.
            least = tl.minimum(shifted, shifted_before, propagate_nan=tl.PropagateNan.ALL)
            weight = tl.where(least < float("inf"), tl.exp2(least - shifted), 1.0)
            before = tl.where(least < float("inf"), tl.exp2(least - shifted_before), 1.0)
            mean = (weight * delta + before * delta_before) / (weight + before)
            both = least - tl.log2(weight + before)
            to = STATS + (WAYS * tl.cast(total, tl.int64) + i)[:, None] * 2 + tl.arange(0, 2)[None, :]
            tl.store(to, tl.join(both, mean), mask=ok[:, None])
        shifted_before, delta_before = shifted, delta


@dataclass(frozen=True)
class Rows:
    """The same row range of every sequence, ordered by sequence, head group, row.

    A group is the query heads of one kv head, or all query heads.

    Attributes:
        heads: query heads of a group.
        begin, length: the range's first row in its sequence, and its rows.
        first, count: the chosen part of the rows in this order: all, or one chunk.
    """

    heads: int
    begin: int
    length: int
    first: int
    count: int


@dataclass(frozen=True)
class Slots:
    """Contributions of the free blocks to a chunk of rows.

    Attributes:
        parts: in q's dtype, [rows.count or more,free,G,D]; or packed (shared/packed_slots.py), int32 [..,WORDS].
        exponents: of packed slots, int32 [rows.count or more,free,G]; None if the slots are not packed.
        lse: base-2 log-sum-exps, float32 [rows.count or more,free,G]; unused in the backward.
        rows: the rows that choose blocks, or a chunk of them.
    """

    parts: Tensor
    exponents: Tensor | None
    lse: Tensor
    rows: Rows


def gated_sum(
    outputs: Sequence[Tensor], gates: Tensor, out: Tensor, rows: Rows, slots: Slots | None = None, way: int = -1,
    lse: Tensor | None = None, call: Call | None = None,
) -> None:  # fmt: skip
    """Write the sum of one to three outputs, each times its column of gates, to the `rows` of `out`.

    Args:
        outputs: [B,S,HQ,DV] of each way; or, of three ways, the gated sum of the first and third in `out`'s dtype, then
            the second. The bits are the same.
        gates, out: [B,S,HQ,ways] and [B,S,HQ,DV].
        slots: of these rows, first merged into the output of column `way`, whose base-2 log-sum-exp is `lse`, float32
            [B,S,HQ]. If the call keeps results for a backward, merged output and lse are written back.
    """
    ways, keeps = gates.shape[-1], call is not None and call.keeps
    tensors = _numbered("O", outputs) | dict(GATES=gates, OUT=out)
    tensors |= dict(LSE=gates if lse is None else lse, LPARTS=gates if slots is None else slots.lse)
    constants = dict(WAYS=ways, SUMMED=len(outputs) < ways, SLC=way, KEEPS=keeps)
    _launch_rows(_merge, "merge", out, "DV", rows, slots, tensors, constants, call)


def sum_dq(slots: Slots, dq: Tensor, call: Call) -> None:
    """Add the slots to dq [B,S,HQ,D] in place."""
    _launch_rows(_sum_dq, "merge_backward", dq, "D", slots.rows, slots, dict(DQ=dq), {}, call)


def _launch_rows(
    kernel: object, stage: str, x: Tensor, dim: str, rows: Rows, slots: Slots | None, tensors: dict[str, Tensor],
    constants: dict[str, int], call: Call | None,
) -> None:  # fmt: skip
    """Launch over `rows` of x [B,S,HQ,D], whose slots are given if they have some; `dim` is the kernel's name of D."""
    numbers = dict(total=rows.count * rows.heads, first=rows.first, length=rows.length, S=x.shape[1], begin=rows.begin)
    sizes = {dim: x.shape[-1], f"{dim}P": padded(x.shape[-1])} | dict(HQ=x.shape[2], G=rows.heads)
    if slots is None or call is None:
        tile = Tile(max(4, 2048 // padded(x.shape[-1])), warps=4)
        tensors = tensors | dict(PARTS=x, EXPONENTS=x, CU=x, sequences=0)  # placeholders
        sizes |= dict(FREE=0, PACKED=False, CAUSAL=0, VARLEN=False)
    else:
        packed = slots.exponents is not None
        tile = Tile(max(4, 1024 // padded(x.shape[-1])), warps=2 if packed else 4)
        tensors = tensors | dict(PARTS=slots.parts, EXPONENTS=slots.exponents if packed else slots.parts)
        tensors |= call.bounds(x)
        sizes |= dict(FREE=slots.parts.shape[1], PACKED=packed, VARLEN=call.packed)
        sizes |= dict(CAUSAL=call.config.slc_count * call.config.slc_block)
    grid, constants = (ceil_div(numbers["total"], tile.rows),), constants | sizes | dict(M=tile.rows)
    launch(kernel, grid, tensors | numbers, constants, tile, stage=stage)


def prepare(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], gates: Tensor, do: Tensor, shared: bool
) -> tuple[Tensor, Tensor]:
    """The gates' gradient and the statistics that the branches' backwards start from, in one pass.

    With lse - log2 g in place of lse a branch's probabilities come out multiplied by its gate g, so that every branch
    starts from the one gradient `do` of the gated sum. A gate of 0 gives lse = +inf and no gradient, as it should.

    Args:
        outputs, lses: [B,S,HQ,DV] and float32 [B,S,HQ] of each branch.
        gates, do: [B,S,HQ,ways], not negative, and [B,S,HQ,DV].
        shared: the last two branches have the same keys and values. Where both see a key, one softmax of their summed
            probabilities stands for both.

    Returns:
        The gradient of gates [B,S,HQ,ways], and (lse - log2 g, do · o) of each branch, then of the last two as one if
        they are shared: float32 [ways or ways + 1,B,S,HQ,2].
    """
    ways, total, dim = len(outputs), gates[..., 0].numel(), do.shape[-1]
    dgates, tile = torch.empty_like(gates), Tile(max(4, 2048 // padded(dim)), warps=4)
    stats = torch.empty(ways + shared, *do.shape[:3], 2, dtype=torch.float32, device=do.device)
    tensors = _numbered("O", outputs) | _numbered("LSE", lses) | dict(GATES=gates, DO=do, DGATES=dgates, STATS=stats)
    constants = dict(DV=dim, DVP=padded(dim), WAYS=ways, SHARED=shared, M=tile.rows)
    arguments, grid = tensors | dict(total=total), (ceil_div(total, tile.rows),)
    launch(_prepare, grid, arguments, constants, tile, stage="gates_backward")
    return dgates, stats


def _numbered(name: str, xs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Kernel arguments: three tensors by name and number, the first in the place of those that are missing."""
    return {f"{name}{i + 1}": xs[i] if i < len(xs) else xs[0] for i in range(3)}
