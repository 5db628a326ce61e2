"""Packed sequences: their bounds, checked without waiting for the device, and computing them one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._inputs import Operands
from .config import NSAConfig
from .errors import InputError

_FIX = "give an int32 tensor that ascends from 0 to the {} tokens of the input: the bounds of the sequences"


def sequence_spans(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    """(start, end) of every packed sequence, empty ones included. Reads cu_seqlens once; raises InputError."""
    fix = _FIX.format(total)
    if not isinstance(cu_seqlens, Tensor):
        raise InputError("cu_seqlens", type(cu_seqlens).__name__, fix)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        dtype = str(cu_seqlens.dtype).removeprefix("torch.")
        raise InputError("cu_seqlens", f"{list(cu_seqlens.shape)} {dtype} on {cu_seqlens.device}", fix)
    bounds = cu_seqlens.flatten().tolist()
    ascending = len(bounds) > 1 and all(a <= b for a, b in pairwise(bounds))
    if cu_seqlens.dim() != 1 or not ascending or bounds[0] != 0 or bounds[-1] != total:
        text = str(bounds)
        raise InputError("cu_seqlens", text if len(text) <= 80 else f"{text[:77]}...", fix)
    return list(pairwise(bounds))


def checked_bounds(cu_seqlens: Tensor, total: int, device: torch.device) -> Tensor:
    """Bounds as int32 on `device`, checked where they are: on the host, or by the device without waiting for it.

    Raises:
        InputError: they are not bounds of sequences of `total` tokens.
    """
    if _on_host(cu_seqlens):
        sequence_spans(cu_seqlens, total)
        return cu_seqlens.to(device, torch.int32, non_blocking=True)
    fix = _FIX.format(total)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise InputError("cu_seqlens", f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}", fix)
    cu_seqlens = cu_seqlens.to(device)
    sound = (cu_seqlens.diff() >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total)
    torch.ops.aten._assert_async.msg(sound, f"cu_seqlens: {fix}")
    return cu_seqlens.to(torch.int32)


def checked_packing(
    operands: Operands, config: NSAConfig, cu_seqlens: Tensor, max_seqlen: int | None
) -> tuple[Tensor, int]:
    """Bounds of packed operands as of `checked_bounds`, and a length that no sequence exceeds.

    That is max_seqlen, or where it is None the longest sequence's, or the total where that is on a GPU alone.

    Raises:
        InputError: cu_seqlens are not bounds of sequences, or one is longer than max_seqlen, or there are more or fewer
            compressed tokens than the sequences have. Values on a GPU are checked there, by a device-side assertion.
    """
    if max_seqlen is not None and (not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool) or max_seqlen < 1):
        raise InputError("max_seqlen", repr(max_seqlen), "use the length of the longest sequence, a whole number >= 1")
    longest = total = len(operands.q)
    bounds, lengths = checked_bounds(cu_seqlens, total, operands.q.device), cu_seqlens.diff()
    fix = "use the length of the longest sequence"
    if _on_host(cu_seqlens):
        longest = int(lengths.max())
        fix += f": {longest}"
    if max_seqlen is not None:
        require((lengths <= max_seqlen).all(), "max_seqlen", f"{max_seqlen}", fix)
    given = {name: len(x) for name, x in (("k_cmp", operands.k_cmp), ("v_cmp", operands.v_cmp)) if x is not None}
    if given:
        count, fix = compressed_counts(cu_seqlens, config).sum(), "give those that its blocks make of every sequence"
        for name, tokens in given.items():
            # A number in the text would make a graph of this number alone.
            value = "compressed tokens" if torch.compiler.is_compiling() else f"{tokens} compressed tokens"
            require(count == tokens, name, value, fix)
    return bounds, min(max_seqlen or longest, total)


def compute_packed(
    compute: Callable[[Operands], Tensor], operands: Operands, config: NSAConfig, cu_seqlens: Tensor,
    max_seqlen: int | None,
) -> Tensor:  # fmt: skip
    """Results [total,..] of `compute`, which takes a batch [B,S,..], for each packed sequence by itself.

    Reads cu_seqlens on the host. Raises InputError as `checked_packing`.
    """
    spans, outputs, first = sequence_spans(cu_seqlens, len(operands.q)), [], 0
    checked_packing(operands, config, cu_seqlens.cpu(), max_seqlen)
    for start, end in spans:
        if start < end:
            last = first + config.cmp_tokens(end - start)
            tokens, compressed = slice(start, end), slice(first, last)
            one = operands.each(lambda x, at=tokens: x[None, at], lambda x, at=compressed: x[None, at])
            outputs.append(compute(one)[0])
            first = last
    return torch.cat(outputs)


def document_bounds(tokens: Tensor, end_token: int) -> Tensor:
    """Bounds, int32 [documents + 1], of the documents in the flattened tokens [B,S]: of a row, or up to an `end_token`.

    They are on the tokens' device; a GPU is waited for.
    """
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end_token
    return pad(begins.flatten().nonzero()[:, 0], (0, 1), value=tokens.numel()).int()


@dataclass(frozen=True)
class Packing:
    """Packed sequences as layers use them, on the tokens' device: made once a pass, or each layer would wait for it.

    Attributes:
        bounds: int32 [sequences + 1].
        longest: tokens of the longest sequence.
        positions: each token's in its sequence, int64 [total].
        blocks: tokens of each compressed token, int64 [Nc,cmp_block].
    """

    bounds: Tensor
    longest: int
    positions: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor | Packing, total: int, device: torch.device, config: NSAConfig) -> Packing:
        """Packing of `total` tokens; one that was made before is returned as it is.

        Raises:
            InputError: cu_seqlens are not bounds of sequences of so many tokens.
        """
        if isinstance(cu_seqlens, Packing):
            return cu_seqlens
        spans = sequence_spans(cu_seqlens, total)
        bounds = cu_seqlens.cpu().int()
        positions, remaining = places_in(bounds)
        firsts = ((positions % config.cmp_stride == 0) & (remaining >= config.cmp_block)).nonzero()
        blocks = firsts + torch.arange(config.cmp_block)
        longest = max(end - start for start, end in spans)
        return cls(bounds.to(device), longest, positions.to(device), blocks.to(device))

    def for_compiled(self, longest: int) -> Packing:
        """The same for a compiled pass: one graph serves all packings whose sequences have up to `longest` tokens."""
        for sized in (self.bounds, self.blocks):
            torch._dynamo.maybe_mark_dynamic(sized, 0)
        return replace(self, longest=longest)


def places_in(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's position in its sequence, int64 [total], and the tokens from it to the sequence's end."""
    lengths = bounds.diff()
    starts, ends = (x.repeat_interleave(lengths) for x in (bounds[:-1], bounds[1:]))
    tokens = torch.arange(len(starts), device=bounds.device)
    return tokens - starts, ends - tokens


def check_blocks(operands: Operands, config: NSAConfig, cu_seqlens: Tensor | None) -> None:
    """Raise InputError unless a query's given blocks are as `functional.selected_attention` has them."""
    blocks, (rows, tokens) = operands.blocks, (operands.q.shape[-3], operands.keys[0].shape[-3])
    if blocks is None:
        return
    places = torch.arange(tokens - rows, tokens, device=blocks.device)
    if cu_seqlens is not None:
        places = places_in(checked_bounds(cu_seqlens, rows, blocks.device))[0]
    own, given = (places // config.slc_block)[:, None], blocks >= 0
    ascend = given[..., 1:] <= ((blocks.diff() > 0) & given[..., :-1])
    counted = given.sum(-1) == (own + 1).clamp(max=config.slc_count)
    sound = ascend.all() & counted.all() & (blocks <= own[..., None]).all()
    fix = f"give {config.slc_count} ascending blocks at or before each query's own, or all of them and then -1"
    require(sound, "blocks", f"{list(blocks.shape)} {blocks.dtype}", fix)


def require(sound: Tensor, field: str, value: str, fix: str) -> None:
    """Raise InputError unless `sound`; a GPU, and code that torch.compile traced, asserts it without waiting."""
    if not _on_host(sound):
        torch.ops.aten._assert_async.msg(sound, f"{field}: {value}: {fix}")
    elif not sound:
        raise InputError(field, value, fix)


def compressed_counts(bounds: Tensor, config: NSAConfig) -> Tensor:
    """Compressed tokens of each sequence, int64 [sequences]."""
    return ((bounds.long().diff() - config.cmp_block) // config.cmp_stride + 1).clamp_min(0)


def _on_host(x: Tensor) -> bool:
    """Whether x's values can be read without waiting; torch.compile traces without values."""
    return not isinstance(x, Tensor) or not (x.is_cuda or torch.compiler.is_compiling())
