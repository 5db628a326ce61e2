# pyright: reportMissingImports=false
"""The ends of forward and backward: the slots of the selected branch merged, the gates applied or folded away."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import Tile, ceil_div, launch, padded


@triton.jit
def _merge(
    PARTS, LPARTS, CHOSEN, O, LSE, total, first, per_sequence, skip,
    G: tl.constexpr, COUNT: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """O [.,DV] and LSE of M (row, head) pairs, whose first is `first` + M · program, from their COUNT slots.

    The first `skip` of every `per_sequence` pairs are left alone.
    """
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, dv = (i < total) & ((first + i) % per_sequence >= skip), tl.arange(0, DVP)
    pair, g = i // G, i % G
    m = tl.full([M], -1e30, tl.float32)
    for rank in range(COUNT):
        used = ok & (tl.load(CHOSEN + pair * COUNT + rank, mask=ok, other=-1) >= 0)
        lse = tl.load(LPARTS + (pair * COUNT + rank) * G + g, mask=used, other=float("-inf"))
        m = tl.maximum(m, lse)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for rank in range(COUNT):
        used = ok & (tl.load(CHOSEN + pair * COUNT + rank, mask=ok, other=-1) >= 0)
        slot = (pair * COUNT + rank) * G + g
        p = tl.exp2(tl.load(LPARTS + slot, mask=used, other=float("-inf")) - m)
        o = tl.load(PARTS + slot[:, None] * DV + dv[None, :], mask=used[:, None] & (dv < DV)[None, :], other=0.0)
        l += p
        acc += p[:, None] * o.to(tl.float32)
    acc = acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
    at = O + (first + i)[:, None] * DV + dv[None, :]
    tl.store(at, acc.to(O.dtype.element_ty), mask=ok[:, None] & (dv < DV)[None, :])
    tl.store(LSE + first + i, tl.where(l > 0, m + tl.log2(l), float("inf")), mask=ok)


@triton.jit
def _sum_dq(
    PARTS, CHOSEN, HEAD, D1, D2, DQ, total, first, per_sequence, skip,
    G: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """DQ = the COUNT slots of M (row, head) pairs, in rank order, + the first OTHERS of D1 and D2.

    The first `skip` of every `per_sequence` pairs have no slots but a row of HEAD [sequences,skip,D].
    """
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, d = i < total, tl.arange(0, DP)
    pair, g = i // G, i % G
    inside = ok[:, None] & (d < D)[None, :]
    at = (first + i)[:, None] * D + d[None, :]
    acc = tl.zeros([M, DP], tl.float32)
    if OTHERS > 0:
        acc = tl.load(D1 + at, mask=inside, other=0.0).to(tl.float32)
    if OTHERS > 1:
        acc += tl.load(D2 + at, mask=inside, other=0.0).to(tl.float32)
    sequence, place = (first + i) // per_sequence, (first + i) % per_sequence
    slots = place >= skip
    of_head = (ok & (place < skip))[:, None] & (d < D)[None, :]
    acc += tl.load(HEAD + (sequence * skip + place)[:, None] * D + d[None, :], mask=of_head, other=0.0).to(tl.float32)
    for rank in range(COUNT):
        used = ok & slots & (tl.load(CHOSEN + pair * COUNT + rank, mask=ok, other=-1) >= 0)
        slot = (pair * COUNT + rank) * G + g
        part = tl.load(PARTS + slot[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0)
        acc += part.to(tl.float32)
    tl.store(DQ + at, acc.to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _gate(
    O1, O2, O3, GATES, OUT, total, WAYS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """OUT = Σ of the WAYS outputs times their columns of GATES [.,WAYS], for M (row, head) pairs."""
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, d = i < total, tl.arange(0, DVP)
    inside = ok[:, None] & (d < DV)[None, :]
    at = i[:, None] * DV + d[None, :]
    out = tl.zeros([M, DVP], tl.float32)
    for way in tl.static_range(WAYS):
        source = O1 if way == 0 else (O2 if way == 1 else O3)
        g = tl.load(GATES + i * WAYS + way, mask=ok, other=0.0).to(tl.float32)
        out += g[:, None] * tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _prepare(
    O1, O2, O3, LSE1, LSE2, LSE3, GATES, DO, DGATES, LSES, DELTAS, total,
    WAYS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """DELTAS [WAYS,.] = do · o, which is DGATES [.,WAYS] too, and LSES [WAYS,.] = lse - log2 gate."""
    i = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    ok, d = i < total, tl.arange(0, DVP)
    inside = ok[:, None] & (d < DV)[None, :]
    at = i[:, None] * DV + d[None, :]
    do = tl.load(DO + at, mask=inside, other=0.0).to(tl.float32)
    for way in tl.static_range(WAYS):
        source = O1 if way == 0 else (O2 if way == 1 else O3)
        lse = LSE1 if way == 0 else (LSE2 if way == 1 else LSE3)
        delta = tl.sum(do * tl.load(source + at, mask=inside, other=0.0).to(tl.float32), 1)
        g = tl.load(GATES + i * WAYS + way, mask=ok, other=0.0).to(tl.float32)
        tl.store(DGATES + i * WAYS + way, delta.to(DGATES.dtype.element_ty), mask=ok)
        tl.store(DELTAS + way * total + i, delta, mask=ok)
        tl.store(LSES + way * total + i, tl.load(lse + i, mask=ok, other=0.0) - tl.log2(g), mask=ok)


def merge_slots(
    parts: Tensor, lse_parts: Tensor, chosen: Tensor, first: int, rows: int, skip: int, o: Tensor, lse: Tensor
) -> None:
    """Writes query rows first .. first+rows-1 (batch and sequence flattened) of o [B,S,HQ,DV] and lse [B,S,HQ].

    The first `skip` rows of every sequence are left alone.

    Args:
        parts, lse_parts: the slots of these rows, [rows,HKV,n,G,DV] and [rows,HKV,n,G].
        chosen: the selected blocks [B,S,HKV,n].
    """
    pointers = dict(PARTS=parts, LPARTS=lse_parts, CHOSEN=_of_rows(chosen, first), O=o, LSE=lse)
    _launch_rows(_merge, o, rows, pointers, _places(o, first, skip), _slots(chosen, o, "DV"))


def sum_dq(
    parts: Tensor, chosen: Tensor, head: Tensor, first: int, rows: int, others: list[Tensor], dq: Tensor
) -> None:
    """Sums the slots [rows,HKV,n,G,D] of query rows first .. first+rows-1, and `others`, into dq.

    dq and at most two others are [B,S,HQ,D]; dq may be one of them. The first rows of every sequence have no slots;
    their part is head [B,skip,HQ,D].
    """
    d1, d2, *_ = [*others, dq, dq]
    pointers = dict(PARTS=parts, CHOSEN=_of_rows(chosen, first), HEAD=head, D1=d1, D2=d2, DQ=dq)
    constants = _slots(chosen, dq, "D") | dict(OTHERS=len(others))
    _launch_rows(_sum_dq, dq, rows, pointers, _places(dq, first, head.shape[1]), constants)


def _places(x: Tensor, first: int, skip: int) -> dict[str, int]:
    """In (row, head) pairs of x [B,S,HQ,D]."""
    heads = x.shape[2]
    return dict(first=first * heads, per_sequence=x.shape[1] * heads, skip=skip * heads)


def gated_sum(outputs: list[Tensor], gates: Tensor) -> Tensor:
    """Σ of one to three outputs [B,S,HQ,DV] times their columns of gates [B,S,HQ,len(outputs)]."""
    out = torch.empty_like(outputs[0])
    pointers = dict(zip(("O1", "O2", "O3"), _three(outputs), strict=True)) | dict(GATES=gates, OUT=out)
    _launch_rows(_gate, out, out.shape[0] * out.shape[1], pointers, {}, _width(out, "DV") | dict(WAYS=len(outputs)))
    return out


def prepare(
    outputs: list[Tensor], lses: list[Tensor], gates: Tensor, do: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """What the branches' backwards start from, in one pass.

    With lse - log2 g in place of lse the probabilities come out multiplied by the gate, and every branch works from the
    one gradient `do` of the gated sum. A gate of 0 gives lse = +inf and no gradient, as it should; gates are not
    negative.

    Returns:
        the gradient of gates [B,S,HQ,ways], and for each branch lse - log2 g and do · o, float32 [B,S,HQ].
    """
    ways, rows = len(outputs), do.shape[0] * do.shape[1]
    dgates = torch.empty_like(gates)
    folded, deltas = (torch.empty(ways, *do.shape[:3], dtype=torch.float32, device=do.device) for _ in range(2))
    pointers = dict(zip(("O1", "O2", "O3"), _three(outputs), strict=True))
    pointers |= dict(zip(("LSE1", "LSE2", "LSE3"), _three(lses), strict=True))
    pointers |= dict(GATES=gates, DO=do, DGATES=dgates, LSES=folded, DELTAS=deltas)
    _launch_rows(_prepare, do, rows, pointers, {}, _width(do, "DV") | dict(WAYS=ways))
    return dgates, list(folded.unbind()), list(deltas.unbind())


def _launch_rows(
    kernel: object,
    x: Tensor,
    rows: int,
    pointers: dict[str, Tensor],
    numbers: dict[str, int],
    constants: dict[str, int],
) -> None:
    """Over the (row, head) pairs of `rows` query rows of x [B,S,HQ,D], about 2048 elements a program."""
    total, tile = rows * x.shape[2], max(4, 2048 // padded(x.shape[-1]))
    grid = (ceil_div(total, tile),)
    launch(kernel, grid, pointers | numbers | dict(total=total), constants | dict(M=tile), Tile(warps=4))


def _slots(chosen: Tensor, x: Tensor, dim: str) -> dict[str, int]:
    return _width(x, dim) | dict(G=x.shape[2] // chosen.shape[2], COUNT=chosen.shape[3])


def _width(x: Tensor, dim: str) -> dict[str, int]:
    return {dim: x.shape[-1], f"{dim}P": padded(x.shape[-1])}


def _of_rows(chosen: Tensor, first: int) -> Tensor:
    return chosen.flatten(0, 1)[first:]


def _three(xs: list[Tensor]) -> list[Tensor]:
    return [*xs, *xs[:1] * (3 - len(xs))]
