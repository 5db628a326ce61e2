# pyright: reportMissingImports=false
"""Packed slots: device functions that store and sum rows of 128 numbers in 12 bits each, 3/4 of bf16's bytes.

Kernels for Hopper write slots so, and those that merge slots read them. Blocks of 32 numbers share a power of two, as
in the Microscaling formats of the Open Compute Project (v1.0), whose elements have up to 8 bits. An integer's error is
at most 2^-11 of its block's largest number, bf16's at most 2^-8 of each number: the row's error is smaller, but numbers
far below their block's largest lose digits. fp16, with 2^-11 of each number, is better left unpacked.

Column 32 w + 8 j + 2 t + b belongs to block t, whose numbers are those that one thread holds of a warpgroup's product.
Run w of a block has 8 integers 2 j + b, with 2048 added to each, in three words: word j has the pair j in its lower 24
bits, b = 0 first, and byte j of pair 3 in its top 8. A row has 48 words [3,t,w], and one word of four
exponents, byte t for block t. With exponent e a number is its integer times 2^(e - 137); with e = 255 none is finite.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = 48  # per row, without the exponents
_RUNS = gl.constexpr(16)
_HIGH = gl.constexpr(0x4B000000)  # 2^23 as float32: adding an integer puts it in the low mantissa bits
_ZERO = gl.constexpr(8390656.0)  # 2^23 + 2048: the integer 0
_NAN = gl.constexpr(tl.PropagateNan.ALL)
# Layout of words [64,16] of a warpgroup's rows: a thread holds the four runs of its block.
_BY_RUN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_NAN)


@gluon.jit
def store_packed(x, factor, PARTS, EXPONENTS, slot, ok):
    """Store x [64,128], a warpgroup's product, times factor [64] > 0, in the rows `slot` where `ok`.

    PARTS int32 [rows,WORDS], EXPONENTS int32 [rows]. If one number is not finite, its whole block becomes non-finite.
    """
    RUN: gl.constexpr = _BY_RUN
    blocks = x.reshape([64, 4, 4, 4, 2]).permute([0, 3, 1, 2, 4]).reshape([64, 4, 32])
    largest = gl.reduce(gl.abs(blocks), 2, _larger)
    BLOCK: gl.constexpr = largest.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, BLOCK)
    factor = gl.convert_layout(factor, ROW)[:, None]
    # A number within half a unit of 2048 units would round up to 2048, so it takes the next power of two.
    bits = (largest * factor).to(gl.uint32, bitcast=True) + (1 << 12)
    # A unit is at least 2^-125, so that 1 / unit is finite (times a factor of 8 it is not, in blocks below 2^-113).
    exponent = gl.minimum(gl.maximum((bits >> 23).to(gl.int32), 12), 255)
    to = EXPONENTS.to(gl.pointer_type(gl.uint8), bitcast=True) + gl.convert_layout(slot, ROW)[:, None] * 4
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, BLOCK))[None, :]
    gl.store(to + block, exponent.to(gl.uint8), mask=gl.convert_layout(ok, ROW)[:, None] & (block < 4))
    units = ((264 - exponent) << 23).to(gl.float32, bitcast=True) * factor
    numbers = (blocks * units[:, :, None] + _ZERO).to(gl.int32, bitcast=True)
    first, second = gl.split(numbers.reshape([64, _RUNS, 4, 2]))
    pairs = first + (second << 12)
    even, odd = gl.split(pairs.reshape([64, _RUNS, 2, 2]))
    pair0, pair2 = gl.split(even)
    pair1, last = gl.split(odd)
    run = gl.arange(0, _RUNS, layout=gl.SliceLayout(0, RUN))[None, :]
    at = PARTS + (gl.convert_layout(slot, gl.SliceLayout(1, RUN)) * (3 * _RUNS))[:, None] + run
    inside = gl.convert_layout(ok, gl.SliceLayout(1, RUN))[:, None] & (run < _RUNS)
    low, high = 0xFFFFFF, -0x1000000
    word0 = gl.convert_layout((pair0 & low) | (last << 24), RUN)
    word1 = gl.convert_layout((pair1 & low) | ((last << 16) & high), RUN)
    word2 = gl.convert_layout((pair2 & low) | ((last << 8) & high), RUN)
    gl.store(at, word0, mask=inside, eviction_policy="evict_first")
    gl.store(at + _RUNS, word1, mask=inside, eviction_policy="evict_first")
    gl.store(at + 2 * _RUNS, word2, mask=inside, eviction_policy="evict_first")


@triton.jit
def add_packed(total, PARTS, EXPONENTS, slot, weight, ok):
    """total + weight [M] times the rows `slot` where `ok`; total [M,16,2,2,2] float32, made [M,128] by `in_order`."""
    run = tl.arange(0, _RUNS)
    at, inside = PARTS + slot[:, None] * (3 * _RUNS) + run[None, :], ok[:, None] & (run < _RUNS)[None, :]
    word0 = tl.load(at, mask=inside, other=0)
    word1 = tl.load(at + _RUNS, mask=inside, other=0)
    word2 = tl.load(at + 2 * _RUNS, mask=inside, other=0)
    exponents = tl.load(EXPONENTS + slot, mask=ok, other=0)
    exponent = (exponents[:, None] >> (run // 4 * 8)[None, :]) & 0xFF
    unit = (exponent << 23).to(tl.float32, bitcast=True) * (weight / 1024)[:, None]
    last = ((word0 >> 24) & 0xFF) | ((word1 >> 16) & 0xFF00) | ((word2 >> 8) & 0xFF0000)
    pairs = tl.join(tl.join(word0, word2), tl.join(word1, last))
    numbers = (tl.join(pairs & 0xFFF, (pairs >> 12) & 0xFFF) | _HIGH).to(tl.float32, bitcast=True) - _ZERO
    return total + numbers * unit[:, :, None, None, None]


@triton.jit
def in_order(x, M: tl.constexpr):
    """A total of `add_packed` [M,16,2,2,2] as [M,128], columns in order."""
    return tl.reshape(tl.permute(tl.reshape(x, [M, 4, 4, 4, 2]), [0, 2, 3, 1, 4]), [M, 128])
