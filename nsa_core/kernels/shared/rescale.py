# pyright: reportMissingImports=false
"""The sums of the online softmax times the factor that its maximum asks for, late.

As FlashAttention-4 does (flash_attn/cute/softmax.py of github.com/Dao-AILab/flash-attention): a maximum that is
exceeded by no more than SLACK stays. Probabilities are 2^SLACK at most then, and hardly a maximum moves after the first
tiles. Each row decides for itself, so that its bits do not depend on others. A warp whose factors are all 1 skips the
products; Triton knows no branch of a warp, so that is PTX.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLACK = tl.constexpr(8.0)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def later_maximum(m, top):
    """The maximum [M] to go on with, of that so far and the tile's, base 2."""
    return tl.where(top - m > SLACK, top, m)


@triton.constexpr_function
def _votes(rows):
    """PTX: whether any factor of the warp is not 1; `rows` factors a thread."""
    of_thread = " ".join(f"setp.neu.or.f32 p, ${rows + i}, 0f3F800000, p;" for i in range(rows))
    told = " ".join(f"selp.b32 ${i}, 1, 0, p;" for i in range(rows))
    start = "{ .reg .pred p; setp.ne.s32 p, 0, 0;"
    return f"{start} {of_thread} vote.sync.any.pred p, p, 0xffffffff; {told} }}"


@triton.constexpr_function
def _products(n):
    """PTX: n numbers times n factors, where the first of n flags is set."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred p; setp.eq.s32 p, ${3 * n}, 0; @p bra DONE; {products} DONE: }}"


@triton.constexpr_function
def _constraints(*operands):
    """Of inline assembly: kinds of operands and their numbers in turn; "same" are registers of the first outputs."""
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return ",".join(str(i) if kind == "same" else kind for kind, count in pairs for i in range(count))


@triton.jit
def rescaled(acc, factor, WARPS: tl.constexpr):
    """acc [M,N] times factor [M], where acc is a product's result: threads of WARPS warps hold rows 8 apart.

    A piece of assembly is all that a thread holds, and a vote that of all of its rows, so the first flag is every one.
    """
    if _INTERPRETED:
        return acc * factor[:, None]
    ROWS: tl.constexpr = acc.shape[0] // (8 * WARPS)
    MINE: tl.constexpr = acc.shape[0] * acc.shape[1] // (32 * WARPS)
    voted = tl.inline_asm_elementwise(
        _votes(ROWS), _constraints("=r", ROWS, "f", ROWS), [factor], dtype=tl.int32, is_pure=True, pack=ROWS
    )
    factors, flags = tl.broadcast_to(factor[:, None], acc.shape), tl.broadcast_to(voted[:, None], acc.shape)
    WAYS: tl.constexpr = _constraints("=f", MINE, "same", MINE, "f", MINE, "r", MINE)
    return tl.inline_asm_elementwise(_products(MINE), WAYS, [acc, factors, flags], tl.float32, is_pure=True, pack=MINE)
