# pyright: reportMissingImports=false
"""The ends of forward and backward: the slots of the selected branch merged, the gates applied or folded away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import launch
from ._tiles import Tile, ceil_div, padded


@triton.jit
def _place(i, first, length, S, begin, HQ: tl.constexpr, G: tl.constexpr):
    """Where the i-th (row, head) pair of a Rows lies among all (row, head) pairs of q."""
    row = first + i // G
    group, row = row // length, begin + row % length
    return (group // (HQ // G) * S + row) * HQ + group % (HQ // G) * G + i % G


@triton.jit
def _with_slots(
    acc, PARTS, LPARTS, LSE, place, ok, pair, g, d,
    G: tl.constexpr, FREE: tl.constexpr, DV: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """An output whose log-sum-exp is in LSE, merged with its FREE slots in rank order.

    KEEPS: LSE becomes that of both.
    """
    own = tl.load(LSE + place, mask=ok, other=float("inf"))
    own = tl.where(own == float("inf"), float("-inf"), own)  # no key: no weight
    m = tl.maximum(own, -1e30)
    for rank in range(FREE):
        m = tl.maximum(m, tl.load(LPARTS + (pair * FREE + rank) * G + g, mask=ok, other=float("-inf")))
    l = tl.exp2(own - m)
    acc *= l[:, None]
    for rank in range(FREE):
        slot = (pair * FREE + rank) * G + g
        p = tl.exp2(tl.load(LPARTS + slot, mask=ok, other=float("-inf")) - m)
        o = tl.load(PARTS + slot[:, None] * DV + d[None, :], mask=ok[:, None] & (d < DV)[None, :], other=0.0)
        l += p
        acc += p[:, None] * o.to(tl.float32)
    if KEEPS:
        tl.debug_barrier()  # every warp reads all of the tile's LSE, and one could be here before another has
        tl.store(LSE + place, tl.where(l > 0, m + tl.log2(l), float("inf")), mask=ok)
    return acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]


@triton.jit
def _merge(
    O1, O2, O3, LSE, PARTS, LPARTS, GATES, OUT, total, first, length, S, begin,
    HQ: tl.constexpr, WAYS: tl.constexpr, SLC: tl.constexpr, G: tl.constexpr, FREE: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, M: tl.constexpr, SUMMED: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """OUT = Σ over WAYS of gate · output, for M (row, head) pairs; way SLC, if there is one, has slots.

    Of three ways the first and third are summed first, and rounded, as they come where SUMMED: all in O1. What is
    merged with slots is written back where KEEPS.
    """
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, d, place = i < total, tl.arange(0, DVP), _place(i, first, length, S, begin, HQ, G)
    inside = ok[:, None] & (d < DV)[None, :]
    at = place[:, None] * DV + d[None, :]
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
            o = _with_slots(o, PARTS, LPARTS, LSE, place, ok, i // G, i % G, d, G, FREE, DV, KEEPS)
            if KEEPS:
                tl.store(source + at, o.to(source.dtype.element_ty), mask=inside)
        out += tl.load(GATES + place * WAYS + way, mask=ok, other=0.0).to(tl.float32)[:, None] * o
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _sum_dq(
    PARTS, DQ, total, first, length, S, begin,
    HQ: tl.constexpr, G: tl.constexpr, FREE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """DQ += the FREE slots of M (row, head) pairs in rank order."""
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    d, pair, g, place = tl.arange(0, DP), i // G, i % G, _place(i, first, length, S, begin, HQ, G)
    inside = (i < total)[:, None] & (d < D)[None, :]
    at = DQ + place[:, None] * D + d[None, :]
    acc = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for rank in range(FREE):
        slot = (pair * FREE + rank) * G + g
        acc += tl.load(PARTS + slot[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _store_stats(STATS, i, lse, delta, ok):
    tl.store(STATS + i[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(lse, delta), mask=ok[:, None])


@triton.jit
def _prepare(
    O1, O2, O3, LSE1, LSE2, LSE3, GATES, DO, DGATES, STATS, total,
    WAYS: tl.constexpr, SHARED: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """STATS [WAYS,.,2] = (lse - log2 gate, do · o); the second is DGATES [.,WAYS] too.

    Where SHARED, one more of the last two ways taken as one: p = p1 + p2 and p (dp - delta) = Σ pi (dp - deltai).
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
        _store_stats(STATS, way * tl.cast(total, tl.int64) + i, shifted, delta, ok)
        if SHARED and way == WAYS - 1:
            least = tl.minimum(shifted, shifted_before)
            weight = tl.where(least < float("inf"), tl.exp2(least - shifted), 1.0)
            before = tl.where(least < float("inf"), tl.exp2(least - shifted_before), 1.0)
            mean = (weight * delta + before * delta_before) / (weight + before)
            both = least - tl.log2(weight + before)
            _store_stats(STATS, WAYS * tl.cast(total, tl.int64) + i, both, mean, ok)
        shifted_before, delta_before = shifted, delta


@dataclass(frozen=True)
class Rows:
    """Rows that lie alike in every sequence, those of one group of heads after those of another.

    They are numbered by sequence, group and row; a group are the query heads of one kv head, or all.

    Attributes:
        heads: of a group.
        begin, length: the first row of each sequence, and how many of each.
        first, count: the numbers of those that are meant: all of them, or a chunk.
    """

    heads: int
    begin: int
    length: int
    first: int
    count: int


@dataclass(frozen=True)
class Slots:
    """What the free blocks add to some rows.

    Attributes:
        parts: in q's dtype, [rows.count or more,free,G,D].
        lse: float32 [rows.count or more,free,G]; without a meaning in the backward.
        rows: those that choose blocks, or a chunk of them.
    """

    parts: Tensor
    lse: Tensor
    rows: Rows

    @property
    def free(self) -> int:
        return self.parts.shape[1]

    @property
    def group(self) -> int:
        return self.parts.shape[2]


def gated_sum(outputs: Sequence[Tensor], gates: Tensor, out: Tensor, rows: Rows) -> None:
    """Writes Σ of one to three outputs [B,S,HQ,DV] times their columns of gates [B,S,HQ,ways] to `out`.

    Args:
        outputs: of each way; or of three ways the gated sum of the first and third, in `out`'s dtype, and the second.
            The bits are the same.
    """
    pointers = _ways(outputs) | dict(LSE=gates, PARTS=gates, LPARTS=gates, GATES=gates, OUT=out)
    constants = _width(out, "DV") | _counted(outputs, gates) | dict(SLC=-1, FREE=0, KEEPS=False)
    _launch_rows(_merge, out, rows, pointers, constants)


def gated_sum_with_slots(
    outputs: Sequence[Tensor], way: int, lse: Tensor, gates: Tensor, out: Tensor, slots: Slots, keeps: bool
) -> None:
    """The same for rows that have slots, which are first merged into one way's output.

    Args:
        lse: [B,S,HQ], of that way.
        keeps: whether its output and lse are written back.
    """
    pointers = _ways(outputs) | dict(LSE=lse, PARTS=slots.parts, LPARTS=slots.lse, GATES=gates, OUT=out)
    constants = _width(out, "DV") | _counted(outputs, gates) | dict(SLC=way, FREE=slots.free, KEEPS=keeps)
    _launch_rows(_merge, out, slots.rows, pointers, constants)


def _ways(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("O1", "O2", "O3"), _three(outputs), strict=True))


def _counted(outputs: Sequence[Tensor], gates: Tensor) -> dict[str, int]:
    ways = gates.shape[-1]
    return dict(WAYS=ways, SUMMED=len(outputs) < ways)


def sum_dq(slots: Slots, dq: Tensor) -> None:
    """Adds the slots to dq [B,S,HQ,D]."""
    constants = _width(dq, "D") | dict(FREE=slots.free)
    _launch_rows(_sum_dq, dq, slots.rows, dict(PARTS=slots.parts, DQ=dq), constants)


def prepare(
    outputs: Sequence[Tensor], lses: Sequence[Tensor], gates: Tensor, do: Tensor, shared: bool
) -> tuple[Tensor, Tensor]:
    """What the branches' backwards start from, in one pass.

    With lse - log2 g in place of lse the probabilities come out multiplied by the gate, and every branch works from the
    one gradient `do` of the gated sum. A gate of 0 gives lse = +inf and no gradient, as it should; gates are not
    negative.

    Args:
        shared: the last two branches have the same keys and values. Of what they both see, one softmax of their
            summed probabilities stands for both.

    Returns:
        the gradient of gates [B,S,HQ,ways], and (lse - log2 g, do · o) of each branch, then of the last two as one if
        they are shared: float32 [ways or ways + 1,B,S,HQ,2].
    """
    ways = len(outputs)
    dgates = torch.empty_like(gates)
    stats = torch.empty(ways + shared, *do.shape[:3], 2, dtype=torch.float32, device=do.device)
    pointers = _ways(outputs)
    pointers |= dict(zip(("LSE1", "LSE2", "LSE3"), _three(lses), strict=True))
    pointers |= dict(GATES=gates, DO=do, DGATES=dgates, STATS=stats)
    _launch_pairs(_prepare, do, gates[..., 0].numel(), pointers, {}, _width(do, "DV") | dict(WAYS=ways, SHARED=shared))
    return dgates, stats


def _launch_rows(kernel: object, x: Tensor, rows: Rows, pointers: dict[str, Tensor], constants: dict[str, int]) -> None:
    """Over these rows of x [B,S,HQ,D]."""
    numbers = dict(first=rows.first, length=rows.length, S=x.shape[1], begin=rows.begin)
    heads = dict(HQ=x.shape[2], G=rows.heads)
    _launch_pairs(kernel, x, rows.count * rows.heads, pointers, numbers, constants | heads)


def _launch_pairs(
    kernel: object, x: Tensor, total: int, pointers: dict[str, Tensor], numbers: dict[str, int],
    constants: dict[str, int],
) -> None:  # fmt: skip
    """Over `total` (row, head) pairs of x [B,S,HQ,D], about 2048 elements a program."""
    tile = max(4, 2048 // padded(x.shape[-1]))
    grid = (ceil_div(total, tile),)
    launch(kernel, grid, pointers | numbers | dict(total=total), constants | dict(M=tile), Tile(warps=4))


def _width(x: Tensor, dim: str) -> dict[str, int]:
    return {dim: x.shape[-1], f"{dim}P": padded(x.shape[-1])}


def _three(xs: Sequence[Tensor]) -> list[Tensor]:
    return [*xs, *xs[:1] * (3 - len(xs))]
