"""PyTorch on CPU and GPU with memory linear in S: chunks of queries, recomputed in the backward.

The forward keeps its inputs and the selected blocks, and no tensor of S² elements. The backward recomputes each chunk's
probabilities P and applies, for o = g·Pv and scores s = scale·qk,

    dg = do·(Pv),   dv = Pᵀ(g·do),   ds = P ∘ (g·do vᵀ - g·dg),   dq = scale·ds k,   dk = scale·dsᵀq.

Deterministic: the same input gives the same bits, forward and backward, on CPU and on CUDA. Half-precision products
accumulate in float32 (on the CPU their operands are cast to it); softmax and the gradients of keys and values are in
float32.

A piece is a chunk of queries with its keys: one span of tokens for all its queries, or gathered blocks, each query its
own. Keys and values are [X,T,D] there, X = batch · kv heads. How a branch is cut follows from shapes and the kind of
device alone. One chunk's workspace stays within a budget, which grows with the queries between a floor (smaller chunks
cost more time in launches than they save in memory) and a ceiling (larger ones gain nothing), so that the whole extra
memory is linear in S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._decorators import undifferentiable
from .._inputs import without_autocast
from ..config import NSAConfig
from ..kernels.runtime.tiles import device_type
from ..routes import Branch, note
from . import _common

_HIDDEN = -1e30  # finite: -inf would turn a row without a visible key into NaN
_MIB = 1 << 20
# (floor, ceiling) in bytes. On the CPU a chunk should stay in the caches, on a GPU it should fill the card.
_BUDGET = {"cpu": (_MIB // 2, 16 * _MIB), "cuda": (64 * _MIB, 256 * _MIB)}
_NARROWEST_BAND = 64  # a window chunk may have so many rows, however narrow the window


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type in ("cpu", "cuda", "meta") else f"it runs on cpu and cuda, not on {device.type}"


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; a chunk of queries sees the compressed tokens up to its last position."""
    note("cmp", "chunked")
    pieces = partial(_compressed_pieces, _CallShape(q, v_cmp), config, offset, k_cmp.shape[1], q.device)
    return _Attend.apply(q, k_cmp, v_cmp, gate, None, _ChunkedBranch(pieces), scale)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks by exact top-k, a chunk of queries at a time."""
    note("select", "chunked")
    (batch, rows), kv_heads = q.shape[:2], k_cmp.shape[2]
    shape, branch = _CallShape(q, k_cmp), _ChunkedBranch(_compressed_pieces)
    chosen = torch.empty(batch, rows, kv_heads, config.slc_count, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        keys = branch.heads_first(k_cmp)
        for piece in branch.pieces(shape, config, offset, k_cmp.shape[1], q.device):
            p = _probabilities(_rows(q, piece, kv_heads), branch.read(keys, piece), piece, scale)
            scores = _common.importance(p, config.slc_blocks(offset + piece.stop), config)
            positions = torch.arange(offset + piece.start, offset + piece.stop, device=q.device)
            best = _common.choose(scores, positions, config)
            chosen[:, piece.start : piece.stop] = best.unflatten(0, (batch, kv_heads)).transpose(1, 2)
    return chosen


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch; every query's blocks are gathered, a chunk of queries at a time."""
    note("slc", "chunked")
    pieces = partial(_selected_pieces, _CallShape(q, v), config, k.shape[1] - q.shape[1], q.device)
    return _Attend.apply(q, k, v, gate, blocks, _ChunkedBranch(pieces, config.slc_block), scale)


def window(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float, branch: Branch = "win"
) -> Tensor:
    """Window branch, or dense attention; a chunk of queries sees its own positions and the window before them."""
    note(branch, "chunked")
    pieces = partial(_band_pieces, _CallShape(q, v), window, k.shape[1] - q.shape[1], q.device)
    return _Attend.apply(q, k, v, gate, None, _ChunkedBranch(pieces), scale)


class _Attend(torch.autograd.Function):
    """Gated attention of one branch, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor | None, branch: _ChunkedBranch,
        scale: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v, gate, blocks)
        ctx.branch, ctx.scale = branch, scale
        kv_heads = k.shape[2]
        keys, values = branch.heads_first(k), branch.heads_first(v)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for piece in branch.pieces(blocks, False):
            p = _probabilities(_rows(q, piece, kv_heads), branch.read(keys, piece), piece, scale)
            part = _product(p, branch.read(values, piece))
            if gate is not None:
                part *= _rows(gate.unsqueeze(-1), piece, kv_heads)
            _store(out, piece, part)
        return out

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, gate, blocks = ctx.saved_tensors
        branch, kv_heads = ctx.branch, k.shape[2]
        keys, values = branch.heads_first(k), branch.heads_first(v)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dgate = None if gate is None else torch.empty_like(gate, memory_format=torch.contiguous_format)
        accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
        dk, dv = (torch.zeros(x.shape, dtype=accumulator, device=x.device) for x in (keys, values))
        with without_autocast(q):
            for piece in branch.pieces(blocks, True):
                rows, key, value = _rows(q, piece, kv_heads), branch.read(keys, piece), branch.read(values, piece)
                p = _probabilities(rows, key, piece, ctx.scale)
                dpart = _rows(dout, piece, kv_heads)
                dg = (_product(p, value) * dpart).sum(-1, keepdim=True)
                if gate is not None and dgate is not None:
                    g = _rows(gate.unsqueeze(-1), piece, kv_heads)
                    _store(dgate.unsqueeze(-1), piece, dg)
                    dpart, dg = (dpart * g).to(dpart.dtype), dg * g
                branch.add(dv, piece, _transposed_product(p, dpart, len(value)))
                ds = _product(dpart, value.mT).sub_(dg).mul_(p).mul_(ctx.scale)
                _store(dq, piece, _product(ds, key))
                branch.add(dk, piece, _transposed_product(ds, rows, len(key)))
        dk, dv = (
            total[:, : x.shape[1]].unflatten(0, (x.shape[0], kv_heads)).transpose(1, 2).to(x.dtype)
            for total, x in ((dk, k), (dv, v))
        )
        return dq, dk, dv, dgate, None, None, None


def _rows(x: Tensor, piece: _Piece, kv_heads: int) -> Tensor:
    """The piece's rows of x [B,S,Hq,D] as an operand [X,C,G,D]."""
    part = x[:, piece.start : piece.stop].unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(0, 1)
    return part.to(_operand_dtype(x)).contiguous()


def _store(x: Tensor, piece: _Piece, part: Tensor) -> None:
    """Store part [X,C,G,D] in the piece's rows of x [B,S,Hq,D]: the inverse of _rows."""
    into = x[:, piece.start : piece.stop]
    batch, kv_heads = x.shape[0], len(part) // x.shape[0]
    into.unflatten(2, (kv_heads, -1)).copy_(part.unflatten(0, (batch, kv_heads)).transpose(1, 2))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [X,C,G,A] times y [X,A,B] or [X·C,A,B] -> [X,C,G,B] in float32, or float64 for float64."""
    rows = (x.flatten(1, 2) if len(x) == len(y) else x.flatten(0, 1)).to(y.dtype)
    out = torch.bmm(rows, y, out_dtype=torch.float32) if y.itemsize < 4 else torch.bmm(rows, y)
    return out.view(*x.shape[:-1], y.shape[-1])


def _transposed_product(x: Tensor, y: Tensor, batch: int) -> Tensor:
    """x [X,C,G,A] transposed, times y [X,C,G,B] -> [batch,A,B], batch = X or X·C, in float32 or float64."""
    x, y = (z.flatten(1, 2) if len(z) == batch else z.flatten(0, 1) for z in (x, y))
    x = x.to(y.dtype).mT
    return torch.bmm(x, y, out_dtype=torch.float32) if y.itemsize < 4 else torch.bmm(x, y)


def _probabilities(rows: Tensor, keys: Tensor, piece: _Piece, scale: float) -> Tensor:
    """Softmax of scale·q·k over the visible keys, [X,C,G,L]; zeros in rows that see none."""
    scores = _product(rows, keys.mT).mul_(scale)
    part = piece.hidden.shape[-1]
    scores[..., scores.shape[-1] - part :].masked_fill_(piece.hidden, _HIDDEN)
    p = torch.softmax(scores, -1)
    if piece.empty:  # `hidden` then covers every key
        p.masked_fill_(piece.hidden, 0)
    return p


class _CallShape:
    """Sizes of one branch's call, on which the size of a chunk depends; those in bytes are of one number."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.batch, self.rows, self.heads, self.dim = q.shape
        self.kv_heads, self.value_dim = v.shape[2:]
        self.element = _operand_dtype(q).itemsize  # bytes of an operand of the products
        self.accumulator = max(4, self.element)  # and of an accumulator
        floor, ceiling = _BUDGET.get(device_type(q), _BUDGET["cuda"])
        # Bytes that one chunk's workspace may take.
        self.budget = min(max(self.batch * self.rows * self.heads * self.dim * 4, floor), ceiling)

    def chunk(self, keys: int, gathered: int = 0) -> int:
        """Queries of a chunk in which each has `keys` keys, of which it gathers so many bytes of its own.

        It also holds scores and probabilities; in the backward, probabilities and their gradients.
        """
        row = 2 * self.batch * self.heads * keys * self.accumulator + gathered
        return max(1, min(self.rows, self.budget // max(1, row)))


def _operand_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the products' operands: half precision only on CUDA, which accumulates it in float32."""
    return torch.float32 if x.itemsize < 4 and device_type(x) != "cuda" else x.dtype


@dataclass(frozen=True)
class _Piece:
    """Queries start:stop and their keys."""

    start: int  # rows of q
    stop: int
    where: slice | Tensor  # a span of tokens, or the rows to gather from [X·T/unit, unit·D], int64 [X·C·n]
    hidden: Tensor  # bool [1 or X,C,1,H], True where one of the last H keys is masked for a query
    empty: bool = False  # whether some query may see no key at all


@dataclass(frozen=True)
class _ChunkedBranch:
    """One branch cut into pieces, and the layout in which they read keys and values."""

    pieces: Callable[..., Iterator[_Piece]]  # (selected blocks or None, for the backward?): each query in one of them
    unit: int = 0  # tokens of a block that is gathered as a whole; T is padded to a multiple of it. 0: spans alone

    def heads_first(self, x: Tensor) -> Tensor:
        """x [B,T,H,D] as [B·H,T,D], T padded with zeros; a view where possible."""
        missing = -x.shape[1] % max(1, self.unit)
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        x = x.transpose(1, 2).flatten(0, 1)
        return x.contiguous() if self.unit else x

    def read(self, x: Tensor, piece: _Piece) -> Tensor:
        """Keys of the piece [X,L,D], or [X·C,L,D] when gathered, in the dtype of products."""
        if isinstance(piece.where, slice):
            part = x[:, piece.where]
        else:
            gathered = x.view(-1, self.unit * x.shape[-1]).index_select(0, piece.where)
            part = gathered.view(len(x) * (piece.stop - piece.start), -1, x.shape[-1])
        return part.to(_operand_dtype(part))

    def add(self, total: Tensor, piece: _Piece, part: Tensor) -> None:
        """Add `part`, in the layout of `read`, to `total` [X,T,D], in a fixed order."""
        if isinstance(piece.where, slice):
            total[:, piece.where] += part
            return
        blocks = total.view(-1, self.unit * total.shape[-1])
        _common.add_rows(blocks, piece.where, part.view(len(piece.where), -1))


def _compressed_pieces(
    shape: _CallShape, config: NSAConfig, offset: int, tokens: int, device: torch.device, *_: object
) -> Iterator[_Piece]:
    """The compressed branch: a query sees the compressed tokens that end at or before it."""
    for start, stop in _ranges(0, shape.rows, shape.chunk(tokens), device):
        all_see, some_see = config.cmp_tokens(offset + start + 1), config.cmp_tokens(offset + stop)
        ends = torch.arange(all_see, some_see, device=device) * config.cmp_stride + config.cmp_block - 1
        hidden = ends > torch.arange(offset + start, offset + stop, device=device)[:, None]
        yield _Piece(start, stop, slice(0, some_see), hidden[None, :, None], empty=all_see == 0)


def _band_pieces(shape: _CallShape, window: int, offset: int, device: torch.device, *_: object) -> Iterator[_Piece]:
    """The window branch: a query sees the last `window` positions, its own included.

    A chunk's span is chunk + window keys, so that a chunk is at most as long as the window.
    """
    widest = max(window, _NARROWEST_BAND)
    for start, stop in _ranges(0, shape.rows, min(widest, shape.chunk(2 * widest)), device):
        first = max(0, offset + start - window + 1)
        tokens = torch.arange(first, offset + stop, device=device)
        positions = torch.arange(offset + start, offset + stop, device=device)[:, None]
        hidden = (tokens > positions) | (tokens <= positions - window)
        yield _Piece(start, stop, slice(first, offset + stop), hidden[None, :, None])


def _selected_pieces(
    shape: _CallShape, config: NSAConfig, offset: int, device: torch.device, blocks: Tensor, backward: bool
) -> Iterator[_Piece]:
    """The selected branch: a query sees the tokens of its blocks up to its own position.

    Queries that select every block share a span and gather nothing.
    """
    keys = config.slc_count * config.slc_block
    dense = min(max(0, keys - offset), shape.rows)
    for start, stop in _ranges(0, dense, shape.chunk(keys), device):
        positions = torch.arange(offset + start, offset + stop, device=device)
        yield _Piece(start, stop, slice(0, offset + stop), (positions > positions[:, None])[None, :, None])
    total, element = config.slc_blocks(offset + shape.rows), shape.element + shape.accumulator * backward
    gathered = shape.batch * shape.kv_heads * keys * (shape.dim + shape.value_dim) * element
    for start, stop in _ranges(dense, shape.rows, shape.chunk(keys, gathered), device):
        yield _gathered(blocks[:, start:stop], start, offset, total, config)


def _gathered(chosen: Tensor, start: int, offset: int, total: int, config: NSAConfig) -> _Piece:
    """_Piece of the C queries from `start` on with their chosen blocks [B,C,Hkv,n], out of `total` per head."""
    stop = start + chosen.shape[1]
    per_head = chosen.transpose(1, 2).flatten(0, 1).long()  # [X,C,n]
    first = torch.arange(len(per_head), device=chosen.device)[:, None, None] * total
    tokens = per_head.unsqueeze(-1) * config.slc_block + torch.arange(config.slc_block, device=chosen.device)
    positions = torch.arange(offset + start, offset + stop, device=chosen.device)[:, None, None]
    hidden = (tokens > positions) | (tokens < 0)
    return _Piece(start, stop, (per_head.clamp(min=0) + first).flatten(), hidden.flatten(2).unsqueeze(2))


def _ranges(first: int, last: int, step: int, device: torch.device) -> Iterator[tuple[int, int]]:
    starts = range(first, last, step)
    if device.type == "meta":
        # Memory alone is asked for, and pieces only grow but for the last: its peak, or that of the one before it,
        # is the highest, beside what the piece before has left.
        starts = starts[-3:]
    for start in starts:
        yield start, min(start + step, last)
