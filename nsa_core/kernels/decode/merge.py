# pyright: reportMissingImports=false
"""The last launch of a decoding step: merges every branch's parts in order, applies the gates, counts the token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def held_tokens(POSITION, capacity):
    """Tokens in the cache, the step's own included, at most `capacity`: beyond it a token is not stored."""
    return tl.minimum(tl.load(POSITION) + 1, capacity)


@triton.jit
def _merged(
    PARTS, LPARTS, g, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr,
    G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Output [DVP] of head g of the group: COUNT parts merged in order, STEP at a time; zeros if all are empty."""
    within, dv = tl.arange(0, STEP), tl.arange(0, DVP)
    largest = tl.full([STEP], -1e30, tl.float32)
    for i in tl.static_range(0, COUNT, STEP):
        lse = tl.load(LPARTS + (FIRST + i + within) * G + g, mask=i + within < COUNT, other=float("-inf"))
        largest = tl.maximum(largest, lse)
    m = tl.max(largest, 0)
    l = tl.zeros([STEP], tl.float32)
    acc = tl.zeros([STEP, DVP], tl.float32)
    for i in tl.static_range(0, COUNT, STEP):
        at = (FIRST + i + within) * G + g
        p = tl.exp2(tl.load(LPARTS + at, mask=i + within < COUNT, other=float("-inf")) - m)
        o = tl.load(
            PARTS + at[:, None] * DV + dv[None, :], mask=(i + within < COUNT)[:, None] & (dv < DV)[None, :], other=0.0
        )
        l += p
        acc += p[:, None] * o
    total = tl.sum(l, 0)
    return tl.sum(acc, 0) * tl.where(total > 0, 1.0 / total, 0.0)


@triton.jit
def _gate(LOGIT):
    x = tl.load(LOGIT)
    return tl.sigmoid(x.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def _decode_merge(
    PARTS, LPARTS, GATES, OUT, POSITION, capacity,
    HQ: tl.constexpr, HKV: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, STEP: tl.constexpr, GATED: tl.constexpr,
    COUNT1: tl.constexpr, COUNT2: tl.constexpr, COUNT3: tl.constexpr,
):  # fmt: skip
    """Output of a decoding step, from the parts of all branches.

    Grid: (sequences x query heads). A program owns one query head: it merges COUNT1 parts of cmp, COUNT2 of win and
    COUNT3 of slc, which lie in this order, and writes their sum, each times the sigmoid of its gate, to OUT [B,HQ,DV].
    Without GATED there is one branch, of COUNT1 parts. The first program counts the token in POSITION int32 [1].
    PARTS [B·HKV,parts,G,DV], LPARTS [B·HKV,parts,G], float32; GATES [B,HQ,3] logits in the order cmp, slc, win.
    """
    G: tl.constexpr = HQ // HKV
    ALL_PARTS: tl.constexpr = COUNT1 + COUNT2 + COUNT3
    i = tl.program_id(0)
    head, g, dv = i // G, i % G, tl.arange(0, DVP)
    PARTS += head.to(tl.int64) * (ALL_PARTS * G * DV)
    LPARTS += head * (ALL_PARTS * G)
    out = _merged(PARTS, LPARTS, g, 0, COUNT1, STEP, G, DV, DVP)
    if GATED:
        win = _merged(PARTS, LPARTS, g, COUNT1, COUNT2, STEP, G, DV, DVP)
        slc = _merged(PARTS, LPARTS, g, COUNT1 + COUNT2, COUNT3, STEP, G, DV, DVP)
        out = _gate(GATES + i * 3) * out + _gate(GATES + i * 3 + 1) * slc + _gate(GATES + i * 3 + 2) * win
    tl.store(OUT + i.to(tl.int64) * DV + dv, out.to(OUT.dtype.element_ty), mask=dv < DV)
    if i == 0:
        tl.store(POSITION, held_tokens(POSITION, capacity))
