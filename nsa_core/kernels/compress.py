# pyright: reportMissingImports=false
"""Mean compression of keys and values in one launch, forward and backward.

Compressed token i is the mean of x at [i·STRIDE, i·STRIDE + BLOCK). Tokens are summed to strides and strides to blocks,
so that neighbouring blocks share partial sums to the bit. In the backward a position gathers the gradients of the
tokens that cover it, and adds those from the other branches where they have the same keys and values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import Call
from .runtime.launch import launch
from .runtime.tiles import Tile, ceil_div, padded, power_of_two
from .shared.ranges import compressed_tokens, sequence_of

_ROWS = 4  # compressed tokens a program: few, so that short sequences fill the device


@triton.jit
def _mean(
    K, V, KC, VC, CU, T, N, sequences,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Means of every compression block of keys and values.

    Grid: (tiles of ROWS compressed tokens, tiles of DP columns, sequences). A program owns ROWS tokens and DP columns
    of keys and of values, sums them stride by stride in float32, and writes the means to KC and VC.
    K [B,T,D], V [B,T,DV], KC [B,N,D], VC [B,N,DV], contiguous, heads flattened into D and DV.
    VARLEN: those of packed sequences with bounds CU begin at token // STRIDE; tokens of no block become zeros.
    """
    b, i, c = tl.program_id(2).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    d = c * DP + tl.arange(0, DP)
    first, ok = b * T + i * STRIDE, i < N
    if VARLEN:
        _, start, tokens, place = sequence_of(CU, sequences, i, STRIDE, 0)
        first, ok = start.to(tl.int64) + place * STRIDE, ok & (place < compressed_tokens(tokens, BLOCK, STRIDE))
    for of_values in tl.static_range(2):
        x, out = (V, VC) if of_values else (K, KC)
        width = DV if of_values else D
        inside = ok[:, None] & (d < width)[None, :]
        total = tl.zeros([ROWS, DP], tl.float32)
        for stride in range(BLOCK // STRIDE):
            part = tl.zeros([ROWS, DP], tl.float32)
            for u in tl.static_range(STRIDE):  # unrolled, so that loads overlap
                row = first + stride * STRIDE + u
                part += tl.load(x + row[:, None] * width + d[None, :], mask=inside, other=0.0).to(tl.float32)
            total += part
        at, inside = out + (b * N + i)[:, None] * width + d[None, :], (i < N)[:, None] & (d < width)[None, :]
        tl.store(at, (total / BLOCK).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _spread(
    DKC, DVC, DKO, DVO, DK, DVALUE, CU, T, N, chunks, sequences,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, UNROLL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values from those of the compressed tokens that cover them.

    Grid: (strides, tiles of DP columns, sequences). A program owns DP columns of the STRIDE positions of one stride,
    all covered by the same BLOCK/STRIDE tokens; it sums these tokens' gradients over `chunks` parts in order, adds DKO
    and DVO where OTHERS, and writes DK and DVALUE.
    DKC [chunks,B,N,D], DVC [chunks,B,N,DV]; DKO, DK [B,T,D], DVO, DVALUE [B,T,DV], heads flattened into D and DV.
    VARLEN: as in `_mean`.
    """
    b, stride, c = tl.program_id(2).to(tl.int64), tl.program_id(0), tl.program_id(1)
    rows, first, first_token = tl.num_programs(2).to(tl.int64) * N, b * N, b * T
    if VARLEN:
        _, start, T, stride = sequence_of(CU, sequences, stride, STRIDE, 1)
        if stride * STRIDE >= T:
            return
        N, first, first_token = compressed_tokens(T, BLOCK, STRIDE), start.to(tl.int64) // STRIDE, start.to(tl.int64)
    r, d = tl.arange(0, ROWS), c * DP + tl.arange(0, DP)
    t = stride * STRIDE + r
    for of_values in tl.static_range(2):
        x, others, out = (DVC, DVO, DVALUE) if of_values else (DKC, DKO, DK)
        width = DV if of_values else D
        token = tl.zeros([DP], tl.float32)
        for chunk in range(0, chunks, UNROLL):
            for u in tl.static_range(UNROLL):  # unrolled, so that loads overlap
                for before in tl.static_range(BLOCK // STRIDE):
                    part, i = 0 * d + chunk + u, 0 * d + stride - (BLOCK // STRIDE - 1) + before
                    row = part.to(tl.int64) * rows + first + i
                    there = (part < chunks) & (i >= 0) & (i < N) & (d < width)
                    token += tl.load(x + row * width + d, mask=there, other=0.0).to(tl.float32)
        total = tl.broadcast_to((token / BLOCK)[None, :], [ROWS, DP])
        at, inside = (
            (first_token + t)[:, None] * width + d[None, :],
            ((r < STRIDE) & (t < T))[:, None] & (d < width)[None, :],
        )
        if OTHERS:
            total += tl.load(others + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def forward(k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compressed keys [B,N,HKV,D] and values [B,N,HKV,DV] of contiguous k [B,T,HKV,D] and v [B,T,HKV,DV].

    Those of packed sequences are apart: of one that begins at token t from t // cmp_stride on, N = T // cmp_stride.
    """
    k_cmp, v_cmp = compressed_like(k, v, call)
    tokens = k_cmp.shape[1]
    arguments = {"K": k, "V": v, "KC": k_cmp, "VC": v_cmp, "T": k.shape[1], "N": tokens}
    _launch(_mean, "compress", arguments, {"ROWS": _ROWS}, k, v, ceil_div(tokens, _ROWS), call)
    return k_cmp, v_cmp


def compressed_like(k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Tensors like `forward`'s, unwritten."""
    tokens = k.shape[1] // call.config.cmp_stride if call.packed else call.config.cmp_tokens(k.shape[1])
    k_cmp, v_cmp = (x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in (k, v))
    return k_cmp, v_cmp


def backward(
    compressed: tuple[Tensor, Tensor], length: int, dtype: torch.dtype, call: Call,
    others: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of keys [B,length,HKV,D] and values [B,length,HKV,DV], in `dtype`.

    Args:
        compressed: gradients of the compressed keys and values in parts to be summed, [chunks,B,N,HKV,D] and
            [chunks,B,N,HKV,DV], contiguous.
        others: gradients from other branches that have the same keys and values, to be added.
    """
    dk, dv = (x.new_empty(x.shape[1], length, *x.shape[3:], dtype=dtype) for x in compressed)
    more, stride = others or tuple(compressed), call.config.cmp_stride
    pointers = {"DKC": compressed[0], "DVC": compressed[1], "DKO": more[0], "DVO": more[1], "DK": dk, "DVALUE": dv}
    arguments = pointers | {"T": length, "N": compressed[0].shape[2], "chunks": len(compressed[0])}
    constants = {"ROWS": power_of_two(stride), "OTHERS": others is not None, "UNROLL": 4}
    strides = call.tiles(length, stride, 1) if call.packed else ceil_div(length, stride)
    _launch(_spread, "compress_backward", arguments, constants, dk, dv, strides, call)
    return dk, dv


def _launch(
    kernel: object, stage: str, arguments: dict[str, Tensor | int], constants: dict[str, int], k: Tensor, v: Tensor,
    programs: int, call: Call,
) -> None:  # fmt: skip
    """Launch over the rows of k and v, all heads' columns side by side."""
    width, value_width = k.shape[2] * k.shape[3], v.shape[2] * v.shape[3]
    columns = min(128, padded(max(width, value_width)))
    grid = programs, ceil_div(max(width, value_width), columns), k.shape[0]
    sizes = {"D": width, "DV": value_width, "DP": columns, "BLOCK": call.config.cmp_block}
    sizes |= {"STRIDE": call.config.cmp_stride, "VARLEN": call.packed}
    launch(kernel, grid, arguments | call.bounds(k), sizes | constants, Tile(warps=4), stage=stage)
