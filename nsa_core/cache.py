"""Caches of keys and values between decoding steps. All sequences of a batch have one common length.

A cache grows as tokens arrive. With a capacity it allocates all memory at the first token: its tensors never move, so
that a CUDA graph of a step can be replayed. Steps are counted on the device, in `position`, and on the host; replays of
a graph are counted on the device alone, until `recount`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._inputs import Triple
from .config import NSAConfig
from .errors import InputError


class _Held:
    """Tokens [B,T,H,D] in a buffer that is allocated by the first append."""

    # The tokens, with the room behind them, [B,room,H,D]; nothing before the first append. An import must not start
    # CUDA.
    buffer = torch.empty(0, 0, device="cpu")
    length = 0  # tokens appended

    def values(self) -> Tensor:
        """Tokens held [B,T,H,D], a view; of a ring in the order of its slots."""
        return self.buffer[:, : self.length]


@dataclass(eq=False)
class Appended(_Held):
    """Tokens in a buffer that doubles when it is full, so that n appends copy O(n) tokens in all."""

    multiple: int = 64  # of whose tokens the buffer's length is; behind those held it has zeros
    capacity: int = 1  # room, in tokens, from the first append on

    def append(self, x: Tensor) -> None:
        """Append x [B,S,H,D]."""
        end = self.length + x.shape[1]
        self.reserve(end, x)
        self.buffer[:, self.length : end] = x.detach()
        self.length = end

    def reserve(self, tokens: int, like: Tensor) -> None:
        """Make room for `tokens` tokens in all, of the batch, heads, width, dtype and device of `like`."""
        held = self.buffer.shape[1]
        if held and tokens <= held:
            return
        room = -(-max(tokens, 2 * held, self.capacity) // self.multiple) * self.multiple
        buffer = like.new_zeros((like.shape[0], room, *like.shape[2:]))
        if held:
            buffer[:, : self.length] = self.values()
        self.buffer = buffer


@dataclass(eq=False)
class Recent(_Held):
    """Ring of the last `size` tokens appended [B,min(T,size),H,D]; the token at position p is in slot p % size."""

    size: int

    def append(self, x: Tensor) -> None:
        """Append x [B,S,H,D], overwriting the oldest tokens."""
        if not self.buffer.shape[1]:
            self.buffer = x.new_zeros((x.shape[0], self.size, *x.shape[2:]))
        end = self.length + x.shape[1]
        kept = min(x.shape[1], self.size)
        slots = torch.arange(end - kept, end, device=x.device) % self.size
        self.buffer[:, slots] = x[:, -kept:].detach()
        self.length = end

    def in_order(self) -> Tensor:
        """Tokens held, oldest first."""
        return self.values() if self.length <= self.size else self.buffer.roll(-(self.length % self.size), 1)


class _Cache:
    """Counting and capacity, the same for both kinds of attention."""

    def __init__(
        self, config: NSAConfig, capacity: int | None, every_token: Sequence[Appended],
        compressed: Sequence[Appended] = (), recent: Sequence[Recent] = (),
    ) -> None:  # fmt: skip
        if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
            raise InputError("capacity", repr(capacity), "use a whole number of tokens >= 1, or None to let it grow")
        self.config, self.capacity = config, capacity
        self.length = 0  # tokens held as counted on the host: the position of the next one
        self.position: Tensor | None = None  # tokens held, int32 [1] on the device; None before the first
        self.frequencies: Tensor | None = None  # RoPE's, float32 [D/2], kept by the first step that needs them
        self._every_token, self._compressed, self._recent = every_token, compressed, recent

    def note_length(self, tokens: int) -> None:
        """Set the host's counts to `tokens`, after `position` was changed by other means."""
        self.length = tokens
        for held in (*self._every_token, *self._recent):
            held.length = tokens
        for held in self._compressed:
            held.length = self.config.cmp_tokens(tokens)

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
        """Make room for more tokens, with keys k [B,S,..].

        Raises:
            InputError: as `check`, or k has another dtype, or a graph is being captured of a cache without a capacity.
        """
        self.check(*k.shape[:2])
        held = self._every_token[0].buffer.dtype
        if k.dtype != held:
            raise InputError("dtype", k.dtype, f"continue in {held}, as the cache was filled, with autocast on or off")
        if self.capacity is None:
            on_gpu = self.position is not None and self.position.is_cuda
            if on_gpu and torch.cuda.is_current_stream_capturing():
                raise InputError("capacity", None, "a CUDA graph needs new_cache(capacity=...): growing moves tensors")
            tokens = self.length + k.shape[1]
            for part in self._every_token:
                part.reserve(tokens, part.buffer)
            for part in self._compressed:
                part.reserve(self.config.cmp_tokens(tokens), part.buffer)

    def recount(self) -> None:
        """Set the host's counts to the device's, after replays of a graph. Waits for the device."""
        if self.capacity is not None and self.position is not None:
            self.note_length(int(self.position))

    def _append(self, parts: Sequence[Appended | Recent], tensors: Sequence[Tensor]) -> None:
        """Append tensors [B,S,H,D], one to each of `parts`, and count their tokens. Raises InputError as `check`."""
        self.check(*tensors[0].shape[:2])
        for part, x in zip(parts, tensors, strict=True):
            part.append(x)
        if self.position is None:
            self.position = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
        self.position += tensors[0].shape[1]
        self.length += tensors[0].shape[1]


class NSACache(_Cache):
    """Keys and values of one NSA layer, as its three branches read them: keys are rotated, but for those of the last
    `cmp_block` tokens, k_open, of which the next compressed token is made."""

    def __init__(self, config: NSAConfig, capacity: int | None = None) -> None:
        tokens = capacity or 1
        compressed = max(1, config.cmp_tokens(tokens))
        self.k_slc, self.v_slc = Appended(config.slc_block, tokens), Appended(config.slc_block, tokens)
        self.k_cmp, self.v_cmp = Appended(capacity=compressed), Appended(capacity=compressed)
        self.k_win, self.v_win = Recent(config.window), Recent(config.window)
        self.k_open, self.v_open = Recent(config.cmp_block), Recent(config.cmp_block)
        recent = self.k_win, self.v_win, self.k_open, self.v_open
        super().__init__(config, capacity, (self.k_slc, self.v_slc), (self.k_cmp, self.v_cmp), recent)

    def take(self, k: Triple, v: Triple) -> None:
        """Append keys and values [B,S,Hkv,D] of cmp (unrotated), slc and win; call `add_compressed` next.

        Raises:
            InputError: as `check`.
        """
        parts = self.k_open, self.k_slc, self.k_win, self.v_open, self.v_slc, self.v_win
        self._append(parts, (*k, *v))

    def add_compressed(self, k_cmp: Tensor, v_cmp: Tensor) -> None:
        """Append the compressed tokens [B,N,Hkv,D] that the appended tokens completed."""
        self.k_cmp.append(k_cmp)
        self.v_cmp.append(v_cmp)


class DenseCache(_Cache):
    """Keys (rotated) and values of one dense layer."""

    def __init__(self, capacity: int | None = None) -> None:
        self.k, self.v = Appended(capacity=capacity or 1), Appended(capacity=capacity or 1)
        super().__init__(NSAConfig(), capacity, (self.k, self.v))

    def take(self, k: Tensor, v: Tensor) -> None:
        """Append keys and values [B,S,H,D]. Raises InputError as `check`."""
        self._append((self.k, self.v), (k, v))
