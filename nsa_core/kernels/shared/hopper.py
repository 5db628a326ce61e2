# pyright: reportMissingImports=false
"""Device functions that the Gluon kernels for Hopper (sm90) share: rings of tiles, bands of keys; and their launches.

A program is warp-specialized: a producer warp copies keys and values into rings of shared memory, and consumer
warpgroups attend to the same tiles, 64 rows each (as FlashAttention-3 does, arXiv 2407.08608, section 3.1). They
synchronise at the rings' barriers alone: while one computes probabilities, the products of others are under way. The
tiles of all bands of keys form one stream, in which the copies run ahead. Tiles start where a band does, so few loaded
keys are masked out. Kernels over contiguous rows (spans; not the gathered queries of a block) are persistent: a program
goes on with further tiles of rows, and so does its stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..call import Call, Part
from ..runtime.launch import launch
from ..runtime.tiles import Tile, arch, ceil_div
from ..runtime.tma import Tiled
from .ranges import BOTH, SLC_ALONE, WIN_ALONE, compressed_keys, shared_keys, within

ROWS, THREADS = gl.constexpr(64), gl.constexpr(128)  # per warpgroup
# Bands in the stream's order: shared keys of SLC_ALONE, BOTH, and WIN_ALONE, which goes on from BOTH; compressed keys.
ALONE_BAND, BOTH_BAND, WINDOW_BAND, COMPRESSED_BAND, BANDS = (gl.constexpr(i) for i in range(5))
DEPTH = gl.constexpr(2)  # tiles of rows in shared memory or being copied
COPY_REGISTERS = gl.constexpr(40)  # per thread of a producer that gathers rows
PRODUCE_REGISTERS = gl.constexpr(32)  # per thread of `produce`, which only starts TMA copies
# Renamed between Triton 3.6 and 3.9.
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_back = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@triton.constexpr_function
def product(columns):
    """Layout of a warpgroup's product [64,columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def anew(x):
    """x, opaque to the compiler: values computed from it are not hoisted out of loops, where they take registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def by_eights(x):
    """x [rows,n] as [rows,n/8,8]; a thread holds all of the middle axis, along which reductions cross no threads."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def kind_of(slot):
    """Kind of a band of shared keys: SLC_ALONE, WIN_ALONE or BOTH."""
    return gl.where(slot == ALONE_BAND, SLC_ALONE, gl.where(slot == BOTH_BAND, BOTH, WIN_ALONE))


@gluon.jit
def band(slot, t, sizes: gl.constexpr):
    """[first, end) of the keys that query t sees in the band `slot`; `sizes` are the values of ranges.sizes."""
    first, end = compressed_keys(t, sizes[0], sizes[1])
    lo, stop = shared_keys(t, kind_of(slot), sizes[2], sizes[3], sizes[4], sizes[5], sizes[6])
    compressed = slot == COMPRESSED_BAND
    return gl.where(compressed, first, lo), gl.where(compressed, end, stop)


@gluon.jit
def band_tiles(slot, t0, t1, BN: gl.constexpr, sizes: gl.constexpr):
    """(first key, number of tiles) of the band `slot` for queries t0 .. t1; at least one tile."""
    first, _ = band(slot, t0, sizes)
    _, end = band(slot, t1, sizes)
    _, last_causal = band(slot, gl.minimum(t1, gl.maximum(t0, sizes[6] - 1)), sizes)  # ends drop at CAUSAL
    return first, gl.maximum(gl.cdiv(gl.maximum(end, last_causal) - first, BN), 1)


@gluon.jit
def tile_of_heads(tile, S, BQ: gl.constexpr, HKV: gl.constexpr):
    """(sequence, first row, kv head) of a tile; tiles go head by head, longest spans first."""
    tiles = gl.cdiv(S, BQ)
    head = tile // tiles
    return head // HKV, (tiles - 1 - tile % tiles) * BQ, head % HKV


@gluon.jit
def rows_at(b, i, kvh, group, S, HQ: gl.constexpr, G: gl.constexpr, ROW: gl.constexpr):
    """(index in [B,S,HQ], whether the row exists) of a warpgroup's rows of a tile."""
    r = anew(group * ROWS + gl.arange(0, ROWS, layout=ROW))  # 32 bits suffice: a row of q has 256 bytes
    return (b * S + i) * HQ + kvh * G + (r // G * HQ + r % G), i + r // G < S


@gluon.jit
def seen(slot, group, t, t1, G: gl.constexpr, BN: gl.constexpr, ROW: gl.constexpr, sizes: gl.constexpr):
    """Keys of the band `slot` for a tile of queries t .. t1 and the rows of its warpgroup `group`.

    Returns:
        first key and number of key tiles for the whole tile; [first, end) for each of the warpgroup's rows; first and
        end of the keys that all of these rows see.
    """
    own = t + group * (ROWS // G)
    last = gl.minimum(own + (ROWS // G - 1), t1)
    span = band(slot, t + anew(group * ROWS + gl.arange(0, ROWS, layout=ROW)) // G, sizes)
    lo1, end1 = band(slot, last, sizes)
    _, end0 = band(slot, own, sizes)
    key, tiles = band_tiles(slot, t, t1, BN, sizes)
    return key, tiles, span, lo1, gl.minimum(end0, end1)


@gluon.jit
def masked(s, j, span, lo1, end0, SCORES: gl.constexpr):
    """Scores s [ROWS,BN] of the keys from j on, with -inf outside of each row's `span`."""
    BN: gl.constexpr = s.shape[1]
    if (j < lo1) | (j + BN > end0):
        n = j + anew(gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES)))
        s = gl.where(within(n[None, :], span[0][:, None], (span[1] - span[0])[:, None]), s, float("-inf"))
    return s


@gluon.jit
def tiles_of_rows(TILES: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr):
    """Shared memory [TILES,ROWS,D] for tiles of a warpgroup's rows."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [TILES, ROWS, D], LAYOUT)


@gluon.jit
def ring(
    rows: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr, STAGES: gl.constexpr,
    FILL: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """(buffers [STAGES,rows,D], full barriers, empty barriers): full after FILL arrivals, empty after EMPTY."""
    buffers = gl.allocate_shared_memory(
        DTYPE, [STAGES, rows, D], gl.NVMMASharedLayout.get_default_for([rows, D], DTYPE)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=FILL)
        mbarrier.init(empty.index(stage), count=EMPTY)
    return buffers, full, empty


@gluon.jit
def wait(barriers, turn, BEFORE: gl.constexpr):
    """Wait until the buffer of tile `turn` is full; with empty barriers and BEFORE = 1, until it is free for it."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(turn % STAGES), turn // STAGES % 2 ^ BEFORE)


@gluon.jit
def _fetch(x, buffers, full, g, b, j, head):
    """Start to copy rows j .. of sequence b, from `head` on, into the buffer of tile g."""
    STAGES: gl.constexpr = buffers.shape[0]
    mbarrier.expect(full.index(g % STAGES), buffers.shape[1] * buffers.shape[2] * 2)
    _copy_tile(x, [b, j, head, 0], full.index(g % STAGES), buffers.index(g % STAGES).reshape(x.block_shape))


@gluon.jit
def put(x, place, b, i, head):
    """Start to copy this warpgroup's tile in `place` to rows i .. of sequence b, from `head` on."""
    fence_async_shared()
    barrier()
    _copy_back(x, [b, i, head, 0], place.reshape(x.block_shape))


@gluon.jit
def vacate():
    """Wait until the copies that this warpgroup started with `put` have read their tile."""
    tma.store_wait(0)
    barrier()


@gluon.jit
def _fetch_rows(x, buffers, full, empty, turn, b, i, kvh, BQ: gl.constexpr):
    """Start to copy each warpgroup's rows of the program's `turn`-th tile."""
    GROUPS: gl.constexpr = buffers.shape[0] // DEPTH
    G: gl.constexpr = GROUPS * ROWS // BQ
    for group in range(GROUPS):
        wait(empty, turn * GROUPS + group, 1)
        _fetch(x, buffers, full, turn * GROUPS + group, b, i + group * (ROWS // G), kvh * G)


@gluon.jit
def _fetch_all(given, turn, tile, S, BQ: gl.constexpr, HKV: gl.constexpr):
    """`_fetch_rows` of every tensor in `given`, as in `produce`."""
    b, i, kvh = tile_of_heads(tile, S, BQ, HKV)
    for n in gl.static_range(len(given)):
        x, buffers, full, empty = given[n]
        _fetch_rows(x, buffers, full, empty, turn, b, i, kvh, BQ)


@gluon.jit
def produce(
    given, KC, VC, KS, VS, S, offset, heads, rings, sizes: gl.constexpr, BQ: gl.constexpr, HKV: gl.constexpr
):  # fmt: skip
    """Producer: copies the rows of this program's tiles, and the tiles of their streams of keys and values.

    `given`: (tensor, and its ring's buffers, full and empty barriers) for each tensor that is read by rows.
    """
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    BN: gl.constexpr = keys.shape[1]
    first, stop, step = gl.program_id(0), gl.cdiv(S, BQ) * heads, gl.num_programs(0)
    g, turn = S * 0, S * 0
    _fetch_all(given, turn, first, S, BQ, HKV)
    for tile in range(first, stop, step):
        b, i, kvh = tile_of_heads(tile, S, BQ, HKV)
        turn += 1
        for slot in range(BANDS):
            if (slot == WINDOW_BAND) & (tile + step < stop):  # earlier, the last tile's buffers may still be in use
                _fetch_all(given, turn, tile + step, S, BQ, HKV)
            j, tiles = band_tiles(slot, offset + i, offset + gl.minimum(i + BQ, S) - 1, BN, sizes)
            for _ in range(tiles):
                wait(keys_empty, g, 1)
                if slot == COMPRESSED_BAND:
                    _fetch(KC, keys, keys_full, g, b, j, kvh)
                else:
                    _fetch(KS, keys, keys_full, g, b, j, kvh)
                wait(values_empty, g, 1)
                if slot == COMPRESSED_BAND:
                    _fetch(VC, values, values_full, g, b, j, kvh)
                else:
                    _fetch(VS, values, values_full, g, b, j, kvh)
                j += BN
                g += 1  # not `g += tiles` around this loop: Triton 3.6 loses it, which ends in a deadlock


def fits(q: Tensor, parts: Sequence[Part], *others: Tensor) -> bool:
    """Whether the kernels for Hopper take these: head dim 128, half precision, groups of 4, 8 or 16 heads, aligned.

    Args:
        others: tensors [..,D] that the kernel reads besides q, keys and values.
    """
    group = q.shape[2] // parts[0].k.shape[2]
    if not (arch(q) == 90 and q.itemsize == 2 and group in (4, 8, 16)):
        return False
    tensors = [q, *others, *(x for part in parts for x in (part.k, part.v))]
    # Copies are of 16 bytes; fake tensors count as aligned.
    aligned = (x.numel() > 0 and (isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0) for x in tensors)
    return all(x.shape[-1] == 128 for x in tensors) and all(aligned)


def attends_to_all(q: Tensor, parts: Sequence[Part], call: Call, *others: Tensor) -> bool:
    """Whether these fit, all branches are on, and window and selected branch share keys, as in `band`."""
    return call.shared and not call.packed and len(parts) == 3 and fits(q, parts, *others)


def start(
    specialized: tuple[Any, Tile, int], grid: tuple[int, ...] | None, arguments: Mapping[str, Any],
    sizes: Mapping[str, int], *, stage: str, by_rows: Sequence[str] = (),
) -> None:  # fmt: skip
    """Launch a warp-specialized kernel.

    Args:
        specialized: the kernel, its tile, and registers per consumer thread, after the producer's were reallocated.
        grid: None for a persistent kernel: one program per multiprocessor, which takes tile after tile of rows.
        arguments, sizes: arguments and constants by name; names that the kernel lacks are dropped. Of a persistent
            kernel Q is q, KC and VC are compressed, KS and VS shared keys and values.
        stage: as in `launch`.
        by_rows: arguments that a persistent kernel reads or writes by tiles of a warpgroup's rows.
    """
    kernel, tile, registers = specialized
    given = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    if grid is None:
        q, group = arguments["Q"], sizes["HQ"] // sizes["HKV"]
        given["heads"] = q.shape[0] * sizes["HKV"]
        given |= {name: Tiled(arguments[name], tile.keys) for name in ("KC", "VC", "KS", "VS")}
        given |= {name: Tiled(arguments[name], ROWS.value // group, group) for name in by_rows}
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 132  # H100's
        grid = (min(processors, ceil_div(q.shape[1], tile.rows // group) * given["heads"]),)
    constants = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    launch(kernel, grid, given, constants | dict(STAGES=tile.stages, REGISTERS=registers), tile, stage=stage)
