"""Context parallelism: one sequence over the ranks of a process group, which gather its keys and values.

A sequence is cut into 2N equal pieces, of which rank r of N has numbers r and 2N-1-r, so that causal attention is as
much work on each (Llama 3, arXiv 2407.21783, section 3.3.2). A rank's queries see all keys before them: few, as query
heads share them, beside the queries that stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._inputs import Operands
from .config import NSAConfig
from .errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# By their names from PyTorch 2.13 on, or those before; None in a build without either.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))


def share(x: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's share [..,S/N,..] of a sequence along `dim` of x [..,S,..]. Raises InputError as `pieces`."""
    return torch.cat([x.narrow(dim, piece.start, len(piece)) for piece in pieces(x.shape[dim], group)], dim)


def pieces(tokens: int, group: ProcessGroup) -> tuple[range, range]:
    """Positions of this rank's two pieces of a sequence. Raises InputError: it cannot be cut into equal ones."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if tokens % (2 * ranks):
        fix = f"give sequences of a multiple of {2 * ranks} tokens"
        raise InputError("group", f"{ranks} ranks for {tokens} tokens", fix)
    size = tokens // (2 * ranks)
    first, last = rank * size, (2 * ranks - 1 - rank) * size
    return range(first, first + size), range(last, last + size)


def positions(tokens: int, group: ProcessGroup | None, device: torch.device) -> Tensor:
    """Positions int64 [tokens] of this rank's share of a sequence; of all of it without a group."""
    if group is None:
        return torch.arange(tokens, device=device)
    whole = tokens * dist.get_world_size(group)
    return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces(whole, group)])


def gather(shares: Sequence[Tensor], group: ProcessGroup | None) -> Sequence[Tensor]:
    """Whole sequences [B,S,..] of the ranks' shares [B,S/N,..], by one collective.

    Shares without elements, or without a group, are returned as they are. Differentiable: the gradient of a share is
    the sum of all ranks'.
    """
    if group is None or shares[0].numel() == 0:
        return shares
    together = torch.cat([x.flatten(2) for x in shares], -1)
    ranks = _Gather.apply(together, group).unflatten(0, (-1, len(together)))  # [N,B,S/N,D]
    first, last = ranks.chunk(2, 2)
    whole = torch.cat((first, last.flip(0))).transpose(0, 1).flatten(1, 2)
    each = whole.split([math.prod(x.shape[2:]) for x in shares], -1)
    return [y.unflatten(-1, x.shape[2:]) for y, x in zip(each, shares, strict=True)]


def parts(
    operands: Operands, config: NSAConfig, group: ProcessGroup, cu_seqlens: Tensor | None = None
) -> Iterator[Operands]:
    """Operands of this rank's two pieces, each with all keys up to its end, of operands that are shares.

    Compressed keys and values that the caller made are those of the whole sequence. Raises InputError: as `pieces`, or
    sequences are packed, or the shares do not fit each other.
    """
    if cu_seqlens is not None:
        raise InputError("group", f"{group.size()} ranks", "leave out cu_seqlens: packed sequences are not shared")
    replace(operands, k_cmp=None, v_cmp=None).check(config, False)
    if operands.offset:
        raise InputError("k", f"{operands.keys[0].shape[1]} tokens", f"give the {operands.q.shape[1]} of q's share")
    mine = pieces(operands.q.shape[1] * group.size(), group)
    keys, values = operands.keys, operands.values
    if operands.k_cmp is not None and operands.v_cmp is not None:  # the keys that they were made of are not needed
        keys, values = (keys[1], *keys[1:]), (values[1], *values[1:])
    tensors = {id(x): x for x in (*keys, *values)}
    whole = dict(zip(tensors, gather(list(tensors.values()), group), strict=True))
    keys, values = (tuple(whole[id(x)] for x in each) for each in (keys, values))
    rows = [x if x is None else x.chunk(2, 1) for x in (operands.q, operands.gates, operands.blocks)]
    for number, piece in enumerate(mine):
        q, gates, blocks = (x and x[number] for x in rows)
        part = replace(operands, q=q, keys=keys, values=values, gates=gates, blocks=blocks)
        yield part.each(lambda x, end=piece.stop: x[:, :end], lambda x, end=piece.stop: x[:, : config.cmp_tokens(end)])


class _Gather(torch.autograd.Function):
    """The ranks' tensors [n,..], one after the other [N·n,..]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
        _all_gather(out, x.contiguous(), group)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dx = dout.new_empty(ctx.shape)
        _reduce_scatter(dx, dout.contiguous(), group=ctx.group)
        return dx, None
