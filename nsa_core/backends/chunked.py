"""PyTorch on CPU and GPU with memory linear in S: chunks of queries, recomputed in the backward.

The forward keeps its inputs and the selected blocks, and no tensor of S² elements. The backward recomputes each chunk's
probabilities P and applies, for o = g·Pv and scores s = scale·qk,

    dg = do·(Pv),   dv = Pᵀ(g·do),   ds = P ∘ (g·do vᵀ - g·dg),   dq = scale·ds k,   dk = scale·dsᵀq.

Deterministic: the same input gives the same bits, forward and backward, on CPU and on CUDA. Half-precision products
accumulate in float32 (on the CPU their operands are cast to it); softmax and the gradients of keys and values are in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._gradients import undifferentiable
from .._inputs import without_autocast
from ..config import NSAConfig
from ..routes import Branch, note
from . import _common, chunks
from .chunks import CallShape, ChunkedBranch, Piece, operand_dtype

_HIDDEN = -1e30  # finite: -inf would turn a row without a visible key into NaN


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type in ("cpu", "cuda", "meta") else f"it runs on cpu and cuda, not on {device.type}"


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; a chunk of queries sees the compressed tokens up to its last position."""
    note("cmp", "chunked")
    branch = chunks.compressed(CallShape(q, v_cmp), config, offset, k_cmp.shape[1], q.device)
    return _attend(q, k_cmp, v_cmp, gate, None, branch, scale)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks by exact top-k, a chunk of queries at a time."""
    note("select", "chunked")
    (batch, rows), kv_heads = q.shape[:2], k_cmp.shape[2]
    branch = chunks.compressed(CallShape(q, k_cmp), config, offset, k_cmp.shape[1], q.device)
    chosen = torch.empty(batch, rows, kv_heads, config.slc_count, dtype=torch.int32, device=q.device)
    with torch.no_grad():
        keys = branch.heads_first(k_cmp)
        for piece in branch.pieces(None, False):
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
    branch = chunks.selected(CallShape(q, v), config, k.shape[1] - q.shape[1], q.device)
    return _attend(q, k, v, gate, blocks, branch, scale)


def window(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float, branch: Branch = "win"
) -> Tensor:
    """Window branch, or dense attention; a chunk of queries sees its own positions and the window before them."""
    note(branch, "chunked")
    pieces = chunks.band(CallShape(q, v), window, k.shape[1] - q.shape[1], q.device)
    return _attend(q, k, v, gate, None, pieces, scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor | None, branch: ChunkedBranch, scale: float
) -> Tensor:
    out = _Attend.apply(q, k, v, gate, blocks, branch, scale)
    assert isinstance(out, Tensor)
    return out


class _Attend(torch.autograd.Function):
    """Gated attention of one branch, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor | None, branch: ChunkedBranch,
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


def _rows(x: Tensor, piece: Piece, kv_heads: int) -> Tensor:
    """The piece's rows of x [B,S,Hq,D] as an operand [X,C,G,D]."""
    part = x[:, piece.start : piece.stop].unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(0, 1)
    return part.to(operand_dtype(x)).contiguous()


def _store(x: Tensor, piece: Piece, part: Tensor) -> None:
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


def _probabilities(rows: Tensor, keys: Tensor, piece: Piece, scale: float) -> Tensor:
    """Softmax of scale·q·k over the visible keys, [X,C,G,L]; zeros in rows that see none."""
    scores = _product(rows, keys.mT).mul_(scale)
    part = piece.hidden.shape[-1]
    scores[..., scores.shape[-1] - part :].masked_fill_(piece.hidden, _HIDDEN)
    p = torch.softmax(scores, -1)
    if piece.empty:  # `hidden` then covers every key
        p.masked_fill_(piece.hidden, 0)
    return p
