"""Shared parts of the backends in plain PyTorch: the selection of blocks, copies of keys, gates.

The selection's sums run in a fixed order, head after head and token after token, so that equal importance gives equal
bits; ties go to the lower index. So it does not depend on the chunking, the device or the backend.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._decorators import undifferentiable
from ..config import NSAConfig
from ..reference import wide

_INDEX = (1 << 31) - 1  # the lower 32 bits of a key hold _INDEX - index: lower indices make higher keys


def importance(p: Tensor, blocks: int, config: NSAConfig) -> Tensor:
    """Importance p_slc of selection blocks (Eq. 9 and 10).

    Args:
        p: p_cmp [X,C,G,N] of C queries and the G heads of a group over N compressed tokens.
        blocks: selection blocks to score; block j is overlapped by tokens j·r - (m-1) .. j·r + r - 1, with r strides
            in a selection block and m in a compression block.

    Returns:
        [X,C,blocks] in p's dtype.
    """
    shared = p[:, :, 0].clone()
    for head in range(1, p.shape[2]):
        shared += p[:, :, head]
    per_block = config.slc_block // config.cmp_stride
    before = config.cmp_block // config.cmp_stride - 1
    taps = before + per_block
    length = (blocks - 1) * per_block + taps
    shared = pad(shared, (before, length - before - shared.shape[-1]))
    scores = p.new_zeros(*p.shape[:2], blocks)
    for tap in range(taps):
        start = (tap - before) * config.cmp_stride
        overlap = min(start + config.cmp_block, config.slc_block) - max(start, 0)
        scores.add_(shared[..., tap : length - taps + tap + 1 : per_block], alpha=overlap / config.cmp_stride)
    return scores


def choose(scores: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """Blocks selected by `scores` [X,C,blocks] for queries at `positions` [C] (Eq. 11).

    Candidates start at or before the query. The first `init_blocks` and the last `local_blocks` of them are forced;
    the others are ordered by score descending, then index ascending. Returns int32 [X,C,slc_count], ascending, padded
    with -1.
    """
    chosen = _best(ranked(scores, positions, config), min(config.slc_count, scores.shape[-1])).sort(-1).values
    chosen = chosen.masked_fill_(chosen == _INDEX, -1).int()
    return pad(chosen, (0, config.slc_count - chosen.shape[-1]), value=-1)


def ranked(scores: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """Scores [X,C,blocks] by which `choose` orders: infinite for forced blocks, -1 for those after the query."""
    index = torch.arange(scores.shape[-1], device=scores.device)
    own = (positions // config.slc_block).unsqueeze(-1)
    forced = (index < config.init_blocks) | (index > own - config.local_blocks)
    return scores.masked_fill(forced, torch.inf).masked_fill_(index > own, -1.0)


def _best(rank: Tensor, count: int) -> Tensor:
    """Indices of the `count` best scores, _INDEX in place of scores below 0."""
    if rank.dtype == torch.float64:  # its bits leave no room for an index
        values, order = rank.sort(dim=-1, descending=True, stable=True)
        return order[..., :count].masked_fill(values[..., :count] < 0, _INDEX)
    # Bits of floats >= 0 ascend as the floats do, so that one integer of score bits and inverted index orders fully.
    index = torch.arange(rank.shape[-1], device=rank.device)
    keys = (rank.view(torch.int32).long() << 32) | (_INDEX - index)
    best = keys.topk(count, dim=-1, sorted=False).values
    return (_INDEX - (best & _INDEX)).masked_fill_(best < 0, _INDEX)


class _Copies(torch.autograd.Function):
    """Rows `rows` [N] of x [M,D], as often as they are named: [N,D].

    The backward of index_select would sum in half precision, and on CUDA by atomics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows,) = ctx.saved_tensors
        sums = wide(dout)
        total = sums.new_zeros(ctx.count, dout.shape[1])
        add_rows(total, rows, sums)
        return total.to(dout.dtype), None


copies = _Copies.apply


def add_rows(total: Tensor, rows: Tensor, parts: Tensor) -> None:
    """Add each of `parts` [N,D] to the row of `total` [M,D] that `rows` [N] names, in a fixed order."""
    if total.is_cuda:
        total.index_put_((rows,), parts, accumulate=True)  # sorts first; index_add_ would use atomics
    else:
        total.index_add_(0, rows, parts)


def gated(out: Tensor, gate: Tensor | None) -> Tensor:
    return out if gate is None else (out * gate.unsqueeze(-1)).to(out.dtype)
