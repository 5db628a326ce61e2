"""Packed sequences: their bounds, checked without waiting for the device, and as a padded batch.

The Triton kernels take packed sequences as they are. For other backends a row of the batch is filled up with its
sequence's own tokens, again from the first on. They change nothing: attention is causal, so no earlier row sees them,
and they send no gradient, because their own outputs are dropped. They are its own for the sake of NaN, whose gradient
is NaN even for an output that is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._inputs import Operands, bounds_fix, check_tokens, sequence_spans
from .config import NSAConfig
from .errors import InputError


@dataclass(frozen=True)
class Packing:
    """Places of packed sequences in a padded batch.

    Attributes:
        bounds: int32 [sequences + 1].
        starts, lengths: first token and number of tokens of each sequence, int64 [sequences].
        longest: rows of the batch: what no sequence exceeds.
        total: tokens of all sequences.
    """

    bounds: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int
    total: int

    def batch(self, operands: Operands, config: NSAConfig) -> Operands:
        """Packed operands [total,..] as a batch [sequences,longest,..]; k_cmp and v_cmp likewise."""
        self.check_compressed(config, operands.k_cmp, operands.v_cmp)
        return operands.each(self._padded, lambda x: self._compressed(config, x))

    def packed(self, x: Tensor) -> Tensor:
        """Batch x [sequences,longest,..] packed as [total,..]."""
        tokens = torch.arange(self.total, device=x.device)
        sequence = torch.searchsorted(self.starts, tokens, right=True) - 1
        return x.flatten(0, 1).index_select(0, sequence * self.longest + tokens - self.starts[sequence])

    def check_compressed(self, config: NSAConfig, k_cmp: Tensor | None, v_cmp: Tensor | None) -> None:
        """Check that k_cmp and v_cmp [Σ Nc,..] have as many tokens as the sequences have compressed ones."""
        for name, x in (("k_cmp", k_cmp), ("v_cmp", v_cmp)):
            if x is None:
                continue
            tokens = self._compressed_tokens(config).sum()
            if _on_host(tokens):
                check_tokens(name, x, int(tokens))
            else:
                message = f"{name}: {len(x)} tokens: give those that cmp_block and cmp_stride make of every sequence"
                torch.ops.aten._assert_async.msg(tokens == len(x), message)

    def _compressed_tokens(self, config: NSAConfig) -> Tensor:
        """Compressed tokens of each sequence, int64 [sequences]."""
        return ((self.lengths - config.cmp_block) // config.cmp_stride + 1).clamp_min(0)

    def _padded(self, x: Tensor) -> Tensor:
        places = torch.arange(self.longest, device=x.device) % self.lengths.clamp_min(1)[:, None]
        at = self.starts[:, None] + places  # an empty sequence at the end begins behind the last token
        return x.index_select(0, at.clamp_max(len(x) - 1).flatten()).unflatten(0, at.shape)

    def _compressed(self, config: NSAConfig, x: Tensor) -> Tensor:
        """Compressed tokens [Σ Nc,..] as [sequences, Nc of the longest, ..]."""
        counts = self._compressed_tokens(config)
        zeros = x.new_zeros(1, *x.shape[1:])  # for sequences without a compressed token
        starts = torch.where(counts > 0, counts.cumsum(0) - counts, len(x))
        tokens = replace(self, starts=starts, lengths=counts, longest=config.cmp_tokens(self.longest))
        return tokens._padded(torch.cat([x, zeros]))


def packing(cu_seqlens: Tensor, max_seqlen: int | None, total: int, device: torch.device) -> Packing:
    """Packing of `total` tokens with bounds `cu_seqlens`.

    Args:
        max_seqlen: None: the longest sequence's length, or `total` where that is on a GPU alone.

    Raises:
        InputError: cu_seqlens are not bounds of sequences, or one is longer than max_seqlen. Values on a GPU are
            checked there, by a device-side assertion.
    """
    if max_seqlen is not None and (not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool) or max_seqlen < 1):
        raise InputError("max_seqlen", repr(max_seqlen), "use the length of the longest sequence, a whole number >= 1")
    bounds = checked_bounds(cu_seqlens, total, device)
    starts, fix = bounds.long(), "use the length of the longest sequence"
    lengths = starts.diff()
    if _on_host(cu_seqlens):
        longest = int(cu_seqlens.diff().max())
        if max_seqlen is not None and longest > max_seqlen:
            raise InputError("max_seqlen", max_seqlen, f"{fix}: {longest}")
        max_seqlen = max_seqlen or longest
    elif max_seqlen is not None:
        torch.ops.aten._assert_async.msg((lengths <= max_seqlen).all(), f"max_seqlen: {max_seqlen}: {fix}")
    return Packing(bounds, starts[:-1], lengths, min(max_seqlen or total, total), total)


def checked_bounds(cu_seqlens: Tensor, total: int, device: torch.device) -> Tensor:
    """Bounds as int32 on `device`, checked where they are: on the host, or by the device without waiting for it.

    Raises:
        InputError: they are not bounds of sequences of `total` tokens.
    """
    if _on_host(cu_seqlens):
        sequence_spans(cu_seqlens, total)
        return cu_seqlens.to(device, torch.int32, non_blocking=True)
    fix = bounds_fix(total)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise InputError("cu_seqlens", f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}", fix)
    cu_seqlens = cu_seqlens.to(device)
    sound = (cu_seqlens.diff() >= 0).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total)
    torch.ops.aten._assert_async.msg(sound, f"cu_seqlens: {fix}")
    return cu_seqlens.to(torch.int32)


def _on_host(x: Tensor) -> bool:
    """Whether x's values can be read without waiting; torch.compile traces without values."""
    return not isinstance(x, Tensor) or not (x.is_cuda or torch.compiler.is_compiling())
