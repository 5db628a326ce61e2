# pyright: reportMissingImports=false
"""What the kernels for Hopper share, in Gluon: which calls they are for, rings of tiles, and bands of keys.

A program has a warp that copies keys and values into rings of shared memory, and warpgroups that attend, 64 rows each,
to the same tiles (as FlashAttention-3 does, arXiv 2407.08608, section 3.1). They meet at barriers of the rings alone:
while one computes probabilities, others have their products under way. The tiles of all bands of keys are one stream,
of which the copies are ahead. Tiles begin where a band does, so that hardly a key is met in vain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ._launch import launch
from ._tiled import Tiled
from ._tiles import Tile, arch
from .plan import Part, Plan
from .ranges import BOTH, SLC_ALONE, WIN_ALONE, compressed_keys, shared_keys, tile_of_rows, within

ROWS, THREADS = gl.constexpr(64), gl.constexpr(128)  # of a warpgroup
# Bands: compressed keys, then shared ones by kind: BOTH, which the window goes on from, WIN_ALONE and SLC_ALONE.
BANDS = gl.constexpr(BOTH.value + 2)
BOTH_BAND, WINDOW_BAND, LAST_BAND = (gl.constexpr(BOTH.value + 1 - kind.value) for kind in (BOTH, WIN_ALONE, SLC_ALONE))
COPY_REGISTERS = gl.constexpr(40)  # of a thread of those that copy
TILED = ("KC", "VC", "KS", "VS")  # what `produce` reads
# Renamed between Triton 3.6 and 3.9.
copy_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@triton.constexpr_function
def by_row(dim):
    """The layout of copies of rows of `dim` half-precision numbers, 16 bytes a thread."""
    lanes = dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@triton.constexpr_function
def product(columns):
    """The layout of a warpgroup's product, [64,columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def anew(x):
    """x, from which all is computed where it is used, and not kept through loops, which have no registers for it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def by_eights(x):
    """[rows,n] as [rows,n/8,8], of which a thread has all along the middle, so that sums there cross no threads."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def band(slot, t, sizes: gl.constexpr):
    """Keys that query t sees in a band of the stream. `sizes` are those of ranges.sizes, in turn."""
    first, end = compressed_keys(t, sizes[0], sizes[1])
    lo, stop = shared_keys(t, LAST_BAND - slot, sizes[2], sizes[3], sizes[4], sizes[5], sizes[6])
    return gl.where(slot == 0, first, lo), gl.where(slot == 0, end, stop)


@gluon.jit
def band_tiles(slot, t0, t1, BN: gl.constexpr, sizes: gl.constexpr):
    """(first key, tiles) of a band of queries t0 .. t1; one tile at least."""
    first, _ = band(slot, t0, sizes)
    _, end = band(slot, t1, sizes)
    return first, gl.maximum(gl.cdiv(end - first, BN), 1)


@gluon.jit
def rows_of(group, LAYOUT: gl.constexpr):
    """A warpgroup's rows of the program's."""
    return anew(group * ROWS + gl.arange(0, ROWS, layout=LAYOUT))


@gluon.jit
def rows_at(base, first, i, stop, group, HQ: gl.constexpr, G: gl.constexpr, D: gl.constexpr):
    """(pointers, mask) of a warpgroup's rows of [B,S,HQ,D]."""
    r = rows_of(group, gl.SliceLayout(1, by_row(D)))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row(D)))
    at = base + first * D + ((r // G * HQ + r % G)[:, None] * D + d[None, :])
    return at, (i + r // G < stop)[:, None] & (d < D)[None, :]


@gluon.jit
def tile_of_heads(S, skip, offset, BQ: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr):
    """(sequence, kv head, rows) of this program's tile; rows: where they begin in [B,S,HQ], the first, end, offset."""
    i, stop = tile_of_rows(S, skip, BQ)
    kvh, b = gl.program_id(1) % HKV, gl.program_id(1) // HKV
    return b, kvh, ((b.to(gl.int64) * S + i) * HQ + kvh * (HQ // HKV), i, stop, offset)


@gluon.jit
def seen(slot, group, rows, G: gl.constexpr, BN: gl.constexpr, ROW: gl.constexpr, sizes: gl.constexpr):
    """Of a band: (first key, tiles, keys that each row of a warpgroup sees, begin and end of those that all see)."""
    _, i, stop, offset = rows
    t0 = offset + i + group * (ROWS // G)
    t1 = gl.minimum(t0 + (ROWS // G - 1), offset + stop - 1)
    span = band(slot, offset + i + rows_of(group, ROW) // G, sizes)
    lo1, _ = band(slot, t1, sizes)
    _, end0 = band(slot, t0, sizes)
    key, tiles = band_tiles(slot, offset + i, offset + stop - 1, BN, sizes)
    return key, tiles, span, lo1, end0


@gluon.jit
def masked(s, j, span, lo1, end0, SCORES: gl.constexpr):
    """Scores of the keys from j on, -inf where a row does not see one."""
    BN: gl.constexpr = s.shape[1]
    if (j < lo1) | (j + BN > end0):
        n = j + anew(gl.arange(0, BN, layout=gl.SliceLayout(0, SCORES)))
        s = gl.where(within(n[None, :], span[0][:, None], (span[1] - span[0])[:, None]), s, float("-inf"))
    return s


@gluon.jit
def arrived():
    """Wait for this warpgroup's copies; products see them then."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()


@gluon.jit
def tiles_of_rows(TILES: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr):
    """Shared memory for tiles of a warpgroup's rows."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [TILES, ROWS, D], LAYOUT)


@gluon.jit
def ring(
    rows: gl.constexpr, D: gl.constexpr, DTYPE: gl.constexpr, STAGES: gl.constexpr,
    FILL: gl.constexpr, EMPTY: gl.constexpr,
):  # fmt: skip
    """(buffers, barriers of full ones, of empty ones); FILL arrivals make one full, EMPTY make it empty."""
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
    """Until the ring's place of tile `turn` is full; or, of that BEFORE, empty, as a new ring is."""
    STAGES: gl.constexpr = barriers.shape[0]
    mbarrier.wait(barriers.index(turn % STAGES), turn // STAGES % 2 ^ BEFORE)


@gluon.jit
def _fetch(x, buffers, full, g, b, j, head):
    """Start to copy rows j .. of a sequence and head to the place of tile g."""
    STAGES: gl.constexpr = buffers.shape[0]
    BN: gl.constexpr = buffers.shape[1]
    D: gl.constexpr = buffers.shape[2]
    mbarrier.expect(full.index(g % STAGES), BN * D * 2)
    _copy_tile(x, [b, j, head, 0], full.index(g % STAGES), buffers.index(g % STAGES).reshape([1, BN, 1, D]))


@gluon.jit
def produce(t0, t1, KC, VC, KS, VS, b, head, rings, sizes: gl.constexpr):
    """Copies tile after tile of the stream of queries t0 .. t1."""
    keys, keys_full, keys_empty, values, values_full, values_empty = rings
    BN: gl.constexpr = keys.shape[1]
    g = t0 * 0
    for slot in range(BANDS):
        j, tiles = band_tiles(slot, t0, t1, BN, sizes)
        for _ in range(tiles):
            wait(keys_empty, g, 1)
            if slot == 0:
                _fetch(KC, keys, keys_full, g, b, j, head)
            else:
                _fetch(KS, keys, keys_full, g, b, j, head)
            wait(values_empty, g, 1)
            if slot == 0:
                _fetch(VC, values, values_full, g, b, j, head)
            else:
                _fetch(VS, values, values_full, g, b, j, head)
            j += BN
            g += 1  # not `g += tiles` around this loop: Triton 3.6 loses that, and all wait for ever


def fits(q: Tensor, parts: Sequence[Part], *others: Tensor) -> bool:
    """Whether the kernels for Hopper take these: head dim 128, half precision, groups of 4, 8 or 16 heads, aligned.

    Args:
        others: tensors that the kernel reads besides q, keys and values, by rows of the head dim.
    """
    group = q.shape[2] // parts[0].k.shape[2]
    if not (90 <= arch(q) < 100 and q.itemsize == 2 and group in (4, 8, 16)):
        return False
    tensors = [q, *others, *(x for part in parts for x in (part.k, part.v))]
    return all(x.shape[-1] == 128 and _is_aligned(x) for x in tensors)


def attends_to_all(q: Tensor, parts: Sequence[Part], plan: Plan, *others: Tensor) -> bool:
    """Whether it fits, all branches are on, and window and selected branch share keys, as in `band`."""
    return plan.shared and len(parts) == 3 and fits(q, parts, *others)


def _is_aligned(x: Tensor) -> bool:
    """Not empty, and aligned for copies of 16 bytes, as what has no memory yet, where a compiler traces it, will be."""
    return x.numel() > 0 and (isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0)


def start(
    kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], sizes: Mapping[str, int], tile: Tile,
    registers: int, tiled: Sequence[str] = (),
) -> None:  # fmt: skip
    """Launch a kernel.

    Args:
        arguments, sizes: of which it takes those that it names.
        registers: of a thread that attends, once those that copy have given their own.
        tiled: arguments that it reads by tiles of keys.
    """
    given = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    given |= {name: Tiled(given[name], tile.keys) for name in tiled}
    constants = {name: value for name, value in sizes.items() if name in kernel.arg_names}
    launch(kernel, grid, given, constants | dict(STAGES=tile.stages, REGISTERS=registers), tile)
