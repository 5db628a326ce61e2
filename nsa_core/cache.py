"""Caches of keys and values between decoding steps. All sequences of a batch have one common length.

A cache grows as tokens arrive. With a capacity it allocates all memory at the first token: its tensors never move, so
that a CUDA graph of a step can be replayed. Steps are counted on the device, in `position`, and on the host; replays of
a graph are counted on the device alone, until `recount`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import NSAConfig
from .errors import InputError

Triple = tuple[Tensor, Tensor, Tensor]


class _Held:
    """Buffer [B,room,H,D] of tokens, allocated by the first append; `length` counts the tokens appended."""

    _buffer: Tensor | None = None
    length = 0

    @property
    def buffer(self) -> Tensor:
        """Tokens held, with the room behind them, [B,room,H,D]."""
        assert self._buffer is not None, "nothing was appended yet"
        return self._buffer


class Appended(_Held):
    """Tokens [B,T,H,D] in a buffer that doubles when it is full, so that n appends copy O(n) tokens in all.

    Args:
        multiple: the buffer's length is a multiple of this many tokens.
        capacity: room, in tokens, from the first append on.
    """

    def __init__(self, multiple: int = 64, capacity: int = 1) -> None:
        self._multiple, self._capacity = multiple, capacity

    def append(self, x: Tensor) -> None:
        """Append x [B,S,H,D]."""
        end = self.length + x.shape[1]
        self._make_room(end, x)
        self.buffer[:, self.length : end] = x.detach()
        self.length = end

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all; something must have been appended before."""
        self._make_room(tokens, self.buffer)

    def values(self) -> Tensor:
        """Tokens held [B,T,H,D], a view."""
        return self.buffer[:, : self.length]

    def blocks(self) -> Tensor:
        """Buffer as blocks of `multiple` tokens [B,blocks,multiple,H,D], a view; zeros behind the tokens held."""
        return self.buffer.unflatten(1, (-1, self._multiple))

    def _make_room(self, needed: int, like: Tensor) -> None:
        held = 0 if self._buffer is None else self._buffer.shape[1]
        if self._buffer is not None and needed <= held:
            return
        room = -(-max(needed, 2 * held, self._capacity) // self._multiple) * self._multiple
        buffer = like.new_zeros((like.shape[0], room, *like.shape[2:]))
        if self._buffer is not None:
            buffer[:, : self.length] = self.values()
        self._buffer = buffer


class Recent(_Held):
    """Ring of the last `size` tokens appended [B,T,H,D]; the token at position p is in slot p % size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def append(self, x: Tensor) -> None:
        """Append x [B,S,H,D], overwriting the oldest tokens."""
        if self._buffer is None:
            self._buffer = x.new_zeros((x.shape[0], self._size, *x.shape[2:]))
        end = self.length + x.shape[1]
        kept = min(x.shape[1], self._size)
        slots = torch.arange(end - kept, end, device=x.device) % self._size
        self._buffer[:, slots] = x[:, -kept:].detach()
        self.length = end

    def values(self) -> Tensor:
        """Tokens held [B,min(T,size),H,D], a view, in the order of their slots."""
        return self.buffer[:, : min(self.length, self._size)]

    def in_order(self) -> Tensor:
        """Tokens held [B,min(T,size),H,D], oldest first."""
        return self.values() if self.length <= self._size else self.buffer.roll(-(self.length % self._size), 1)


class _Cache:
    """Counting and capacity, the same for both kinds of attention.

    Attributes:
        capacity: most tokens that it holds; None: any number.
        position: tokens held, int32 [1] on the device; None before the first.
        frequencies: RoPE's, float32 [D/2], kept by the first step that needs them.
    """

    def __init__(self, capacity: int | None, *every_token: Appended) -> None:
        if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
            raise InputError("capacity", repr(capacity), "use a whole number of tokens >= 1, or None to let it grow")
        self.capacity = capacity
        self.position: Tensor | None = None
        self.frequencies: Tensor | None = None
        self._every_token = every_token

    @property
    def length(self) -> int:
        """Tokens held as counted on the host: the position of the next one."""
        return self._every_token[0].length

    def note_length(self, tokens: int) -> None:
        """Set the host's counts to `tokens`, after `position` was changed by other means."""
        for held in self._every_token:
            held.length = tokens

    def _reserve(self, tokens: int) -> None:
        for held in self._every_token:
            held.reserve(tokens)

    def check(self, batch: int, tokens: int) -> None:
        """Check that `tokens` more tokens of `batch` sequences fit, by the host's count.

        Raises:
            InputError: there is no room for them, or the cache holds another number of sequences.
        """
        if self.length > 0 and batch != (held := len(self._every_token[0].buffer)):
            raise InputError("batch", batch, f"use {held}, the sequences that the cache holds")
        if self.capacity is not None and self.length + tokens > self.capacity:
            raise InputError("capacity", self.capacity, f"use at least {self.length + tokens}, the tokens to be held")

    def make_room(self, k: Tensor) -> None:
        """Make room for one more token, with keys k [B,1,..].

        Raises:
            InputError: as `check`, or k has another dtype, or a graph is being captured of a cache without a capacity.
        """
        self.check(len(k), 1)
        held = self._every_token[0].buffer.dtype
        if k.dtype != held:
            raise InputError("dtype", k.dtype, f"continue in {held}, as the cache was filled, with autocast on or off")
        if self.capacity is None:
            on_gpu = self.position is not None and self.position.is_cuda
            if on_gpu and torch.cuda.is_current_stream_capturing():
                raise InputError("capacity", None, "a CUDA graph needs new_cache(capacity=...): growing moves tensors")
            self._reserve(self.length + 1)

    def count_step(self) -> None:
        self.note_length(self.length + 1)

    def recount(self) -> None:
        """Set the host's counts to the device's, after replays of a graph. Waits for the device."""
        if self.capacity is not None and self.position is not None:
            self.note_length(int(self.position))

    def _count(self, x: Tensor) -> None:
        """Count the tokens of x [B,S,H,D] on the device."""
        if self.position is None:
            self.position = torch.zeros(1, dtype=torch.int32, device=x.device)
        self.position += x.shape[1]


class NSACache(_Cache):
    """Keys and values of one NSA layer, as its three branches read them.

    Attributes:
        k_cmp, v_cmp: compressed tokens, keys rotated.
        k_slc, v_slc: all tokens of the selected branch, keys rotated.
        k_win, v_win: the last `window` tokens of the window branch, keys rotated.
        k_open, v_open: the last `cmp_block` tokens of the compressed branch, unrotated, from which the next compressed
            token is made.
    """

    def __init__(self, config: NSAConfig, capacity: int | None = None) -> None:
        self.config, tokens = config, capacity or 1
        self.k_slc, self.v_slc = Appended(config.slc_block, tokens), Appended(config.slc_block, tokens)
        super().__init__(capacity, self.k_slc, self.v_slc)
        compressed = max(1, config.cmp_tokens(tokens))
        self.k_cmp, self.v_cmp = Appended(capacity=compressed), Appended(capacity=compressed)
        self.k_win, self.v_win = Recent(config.window), Recent(config.window)
        self.k_open, self.v_open = Recent(config.cmp_block), Recent(config.cmp_block)

    def take(self, k: Triple, v: Triple) -> None:
        """Append keys and values [B,S,Hkv,D] of cmp (unrotated), slc and win; call `add_compressed` next.

        Raises:
            InputError: as `check`.
        """
        self.check(*k[1].shape[:2])
        held = self.k_open, self.k_slc, self.k_win, self.v_open, self.v_slc, self.v_win
        for tokens, x in zip(held, (*k, *v), strict=True):
            tokens.append(x)
        self._count(k[1])

    def add_compressed(self, k_cmp: Tensor, v_cmp: Tensor) -> None:
        """Append the compressed tokens [B,N,Hkv,D] that the appended tokens completed."""
        self.k_cmp.append(k_cmp)
        self.v_cmp.append(v_cmp)

    def note_length(self, tokens: int) -> None:
        super().note_length(tokens)
        for held in (self.k_win, self.v_win, self.k_open, self.v_open):
            held.length = tokens
        self.k_cmp.length = self.v_cmp.length = self.config.cmp_tokens(tokens)

    def _reserve(self, tokens: int) -> None:
        super()._reserve(tokens)
        for held in (self.k_cmp, self.v_cmp):
            held.reserve(self.config.cmp_tokens(tokens))


class DenseCache(_Cache):
    """Keys (rotated) and values of one dense layer."""

    def __init__(self, capacity: int | None = None) -> None:
        self.k, self.v = Appended(capacity=capacity or 1), Appended(capacity=capacity or 1)
        super().__init__(capacity, self.k, self.v)

    def take(self, k: Tensor, v: Tensor) -> None:
        """Append keys and values [B,S,H,D]. Raises InputError as `check`."""
        self.check(*k.shape[:2])
        self.k.append(k)
        self.v.append(v)
        self._count(k)
