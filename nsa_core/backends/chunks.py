"""Branches cut into chunks of queries, for the chunked backend: a function of shapes and the kind of device alone.

A piece is a chunk of queries with its keys: one span of tokens for all its queries, or gathered blocks, each query its
own. Keys and values are [X,T,D] here, X = batch · kv heads.

One chunk's workspace stays within a budget. The budget grows with the queries between a floor (smaller chunks cost
more time in launches than they save in memory) and a ceiling (larger ones gain nothing), so that the whole extra
memory is linear in S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..config import NSAConfig

MIB = 1 << 20
# (floor, ceiling) in bytes. On the CPU a chunk should stay in the caches, on a GPU it should fill the card.
_BUDGET = {"cpu": (MIB // 2, 16 * MIB), "cuda": (64 * MIB, 256 * MIB)}
_assumed: ContextVar[str] = ContextVar("nsa_core_chunks_device", default="cuda")
_NARROWEST_BAND = 64  # a window chunk may have so many rows, however narrow the window


class CallShape:
    """Sizes of one branch's call, on which the size of a chunk depends.

    Attributes:
        batch, rows, heads, dim: sizes of q [B,S,Hq,Dk].
        kv_heads, value_dim: sizes of v [B,T,Hkv,Dv].
        element: bytes of an operand of the products: 2 for half precision on CUDA, 4 for float32, 8 for float64.
        accumulator: bytes of an accumulator: float32, or float64 for float64 operands.
        budget: bytes that one chunk's workspace may take.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.batch, self.rows, self.heads, self.dim = q.shape
        self.kv_heads, self.value_dim = v.shape[2:]
        self.element = operand_dtype(q).itemsize
        self.accumulator = max(4, self.element)
        floor, ceiling = _BUDGET.get(_assumed.get() if q.is_meta else q.device.type, _BUDGET["cuda"])
        self.budget = min(max(self.batch * self.rows * self.heads * self.dim * 4, floor), ceiling)

    def chunk(self, keys: int, gathered: int = 0) -> int:
        """Queries of a chunk in which each has `keys` keys, of which it gathers so many bytes of its own.

        It also holds scores and probabilities; in the backward, probabilities and their gradients.
        """
        row = 2 * self.batch * self.heads * keys * self.accumulator + gathered
        return max(1, min(self.rows, self.budget // max(1, row)))


def operand_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the products' operands: half precision only on CUDA, which accumulates it in float32."""
    device = _assumed.get() if x.is_meta else x.device.type
    return torch.float32 if x.itemsize < 4 and device != "cuda" else x.dtype


@contextmanager
def assume(device: str) -> Iterator[None]:
    """Within the block, tensors without memory are cut as on this kind of device."""
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@dataclass(frozen=True)
class Piece:
    """Queries start:stop and their keys.

    Attributes:
        start, stop: rows of q.
        where: a span of tokens, or the rows to gather from [X·T/unit, unit·D], int64 [X·C·n].
        hidden: bool [1 or X,C,1,H], True where one of the last H keys is masked for a query.
        empty: whether some query may see no key at all.
    """

    start: int
    stop: int
    where: slice | Tensor
    hidden: Tensor
    empty: bool = False


@dataclass(frozen=True)
class ChunkedBranch:
    """One branch cut into pieces, and the layout in which they read keys and values.

    Attributes:
        pieces: (selected blocks or None, for the backward?) -> pieces that cover every query once.
        unit: tokens of a block that is gathered as a whole; T is padded to a multiple of it. 0: spans alone are read.
    """

    pieces: Callable[[Tensor | None, bool], Iterator[Piece]]
    unit: int = 0

    def heads_first(self, x: Tensor) -> Tensor:
        """x [B,T,H,D] as [B·H,T,D], T padded with zeros; a view where possible."""
        missing = -x.shape[1] % max(1, self.unit)
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        x = x.transpose(1, 2).flatten(0, 1)
        return x.contiguous() if self.unit else x

    def read(self, x: Tensor, piece: Piece) -> Tensor:
        """Keys of the piece [X,L,D], or [X·C,L,D] when gathered, in the dtype of products."""
        if isinstance(piece.where, slice):
            part = x[:, piece.where]
        else:
            gathered = x.view(-1, self.unit * x.shape[-1]).index_select(0, piece.where)
            part = gathered.view(len(x) * (piece.stop - piece.start), -1, x.shape[-1])
        return part.to(operand_dtype(part))

    def add(self, total: Tensor, piece: Piece, part: Tensor) -> None:
        """Add `part`, in the layout of `read`, to `total` [X,T,D], in a fixed order."""
        if isinstance(piece.where, slice):
            total[:, piece.where] += part
            return
        blocks, parts = total.view(-1, self.unit * total.shape[-1]), part.view(len(piece.where), -1)
        if total.is_cuda:
            blocks.index_put_((piece.where,), parts, accumulate=True)  # sorts first; index_add_ would use atomics
        else:
            blocks.index_add_(0, piece.where, parts)


def compressed(shape: CallShape, config: NSAConfig, offset: int, tokens: int, device: torch.device) -> ChunkedBranch:
    """The compressed branch: a query sees the compressed tokens that end at or before it."""

    def pieces(blocks: Tensor | None, backward: bool) -> Iterator[Piece]:
        for start, stop in _ranges(0, shape.rows, shape.chunk(tokens), device):
            all_see, some_see = config.cmp_tokens(offset + start + 1), config.cmp_tokens(offset + stop)
            ends = torch.arange(all_see, some_see, device=device) * config.cmp_stride + config.cmp_block - 1
            hidden = ends > torch.arange(offset + start, offset + stop, device=device)[:, None]
            yield Piece(start, stop, slice(0, some_see), hidden[None, :, None], empty=all_see == 0)

    return ChunkedBranch(pieces)


def band(shape: CallShape, window: int, offset: int, device: torch.device) -> ChunkedBranch:
    """The window branch: a query sees the last `window` positions, its own included.

    A chunk's span is chunk + window keys, so that a chunk is at most as long as the window.
    """
    widest = max(window, _NARROWEST_BAND)
    step = min(widest, shape.chunk(2 * widest))

    def pieces(blocks: Tensor | None, backward: bool) -> Iterator[Piece]:
        for start, stop in _ranges(0, shape.rows, step, device):
            first = max(0, offset + start - window + 1)
            tokens = torch.arange(first, offset + stop, device=device)
            positions = torch.arange(offset + start, offset + stop, device=device)[:, None]
            hidden = (tokens > positions) | (tokens <= positions - window)
            yield Piece(start, stop, slice(first, offset + stop), hidden[None, :, None])

    return ChunkedBranch(pieces)


def selected(shape: CallShape, config: NSAConfig, offset: int, device: torch.device) -> ChunkedBranch:
    """The selected branch: a query sees the tokens of its blocks up to its own position.

    Queries that select every block share a span and gather nothing.
    """
    keys = config.slc_count * config.slc_block
    dense = min(max(0, keys - offset), shape.rows)

    def pieces(blocks: Tensor | None, backward: bool) -> Iterator[Piece]:
        assert blocks is not None
        for start, stop in _ranges(0, dense, shape.chunk(keys), device):
            positions = torch.arange(offset + start, offset + stop, device=device)
            hidden = positions > positions[:, None]
            yield Piece(start, stop, slice(0, offset + stop), hidden[None, :, None])
        total, element = config.slc_blocks(offset + shape.rows), shape.element + shape.accumulator * backward
        gathered = shape.batch * shape.kv_heads * keys * (shape.dim + shape.value_dim) * element
        for start, stop in _ranges(dense, shape.rows, shape.chunk(keys, gathered), device):
            yield _gathered(blocks[:, start:stop], start, offset, total, config)

    return ChunkedBranch(pieces, config.slc_block)


def _gathered(chosen: Tensor, start: int, offset: int, total: int, config: NSAConfig) -> Piece:
    """Piece of the C queries from `start` on with their chosen blocks [B,C,Hkv,n], out of `total` per head."""
    stop = start + chosen.shape[1]
    per_head = chosen.transpose(1, 2).flatten(0, 1).long()  # [X,C,n]
    first = torch.arange(len(per_head), device=chosen.device)[:, None, None] * total
    tokens = per_head.unsqueeze(-1) * config.slc_block + torch.arange(config.slc_block, device=chosen.device)
    positions = torch.arange(offset + start, offset + stop, device=chosen.device)[:, None, None]
    hidden = (tokens > positions) | (tokens < 0)
    return Piece(start, stop, (per_head.clamp(min=0) + first).flatten(), hidden.flatten(2).unsqueeze(2))


def _ranges(first: int, last: int, step: int, device: torch.device) -> Iterator[tuple[int, int]]:
    starts = range(first, last, step)
    if device.type == "meta":
        # Memory alone is asked for, and pieces only grow but for the last: its peak, or that of the one before it,
        # is the highest, beside what the piece before has left.
        starts = starts[-3:]
    for start in starts:
        yield start, min(start + step, last)
