# pyright: reportMissingImports=false
"""Late rescaling: device functions by which the online softmax rescales its sums only if its maximum grew enough.

As in FlashAttention-4 (flash_attn/cute/softmax.py of github.com/Dao-AILab/flash-attention): the maximum stays if it is
exceeded by at most SLACK, so that probabilities are at most 2^SLACK, and after the first tiles it rarely changes. Each
row decides for itself, so that its bits do not depend on other rows. A warp whose factors are all 1 skips the products;
Triton has no branch per warp, so that is PTX. For sm90, whose accumulators it knows (see span/forward.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

SLACK = tl.constexpr(8.0)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def later_maximum(m, top):
    """The maximum [M] to go on with, from the one so far, m, and the tile's, top; base 2."""
    return tl.where(top - m > SLACK, top, m)


@triton.constexpr_function
def _votes(rows):
    """PTX: whether any factor of the warp is not 1, given `rows` factors per thread."""
    of_thread = " ".join(f"setp.neu.or.f32 p, ${rows + i}, 0f3F800000, p;" for i in range(rows))
    told = " ".join(f"selp.b32 ${i}, 1, 0, p;" for i in range(rows))
    start = "{ .reg .pred p; setp.ne.s32 p, 0, 0;"
    return f"{start} {of_thread} vote.sync.any.pred p, p, 0xffffffff; {told} }}"


@triton.constexpr_function
def _products(n):
    """PTX: n numbers times n factors, if the first of n flags is set."""
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"{{ .reg .pred p; setp.eq.s32 p, ${3 * n}, 0; @p bra DONE; {products} DONE: }}"


@triton.constexpr_function
def _constraints(*operands):
    """Constraints of inline assembly from (kind, count) pairs; "same" reuses the registers of the first outputs."""
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return ",".join(str(i) if kind == "same" else kind for kind, count in pairs for i in range(count))


@triton.jit
def rescaled(acc, factor, WARPS: tl.constexpr):
    """acc [M,N] times factor [M]; acc has a product's layout, in which threads of WARPS warps hold rows 8 apart.

    Each asm call covers all of a thread's values; the vote is per warp, so all of its flags are equal.
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
