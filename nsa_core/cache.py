"""What attention remembers between decoding steps. All sequences of a batch have one common length."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import NSAConfig


class Appended:
    """Tokens [B,T,H,D] in a buffer that doubles when it is full, so that n appends copy O(n) tokens in all."""

    def __init__(self, multiple: int = 64) -> None:
        self._multiple = multiple
        self._buffer: Tensor | None = None
        self.length = 0

    def append(self, x: Tensor) -> None:
        """Put x [B,S,H,D] behind the tokens held."""
        end = self.length + x.shape[1]
        if self._buffer is None or end > self._buffer.shape[1]:
            self._grow(x, end)
        assert self._buffer is not None
        self._buffer[:, self.length : end] = x.detach()
        self.length = end

    def values(self) -> Tensor:
        """The tokens held, [B,T,H,D], a view."""
        assert self._buffer is not None, "nothing was appended yet"
        return self._buffer[:, : self.length]

    def blocks(self) -> Tensor:
        """The buffer cut into blocks of `multiple` tokens, [B,blocks,multiple,H,D]; zeros behind the tokens held."""
        assert self._buffer is not None, "nothing was appended yet"
        return self._buffer.unflatten(1, (-1, self._multiple))

    def _grow(self, x: Tensor, needed: int) -> None:
        held = 0 if self._buffer is None else self._buffer.shape[1]
        capacity = -(-max(needed, 2 * held) // self._multiple) * self._multiple
        buffer = x.new_zeros((x.shape[0], capacity, *x.shape[2:]))
        if self._buffer is not None:
            buffer[:, : self.length] = self.values()
        self._buffer = buffer


class Recent:
    """The last `size` tokens [B,T,H,D], in no particular order: rotated keys carry their position themselves."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffer: Tensor | None = None
        self.length = 0

    def append(self, x: Tensor) -> None:
        """Take x [B,S,H,D] in, dropping the oldest tokens."""
        if self._buffer is None:
            self._buffer = x.new_zeros((x.shape[0], self._size, *x.shape[2:]))
        end = self.length + x.shape[1]
        kept = min(x.shape[1], self._size)
        slots = torch.arange(end - kept, end, device=x.device) % self._size
        self._buffer[:, slots] = x[:, -kept:].detach()
        self.length = end

    def values(self) -> Tensor:
        """The tokens held, [B,min(T,size),H,D], a view."""
        assert self._buffer is not None, "nothing was appended yet"
        return self._buffer[:, : min(self.length, self._size)]


class NSACache:
    """Keys and values of one NSA layer: what its three branches read, and nothing else.

    Attributes:
        k_cmp, v_cmp: the compressed tokens, keys rotated.
        k_slc, v_slc: all tokens of the selected branch, keys rotated.
        k_win, v_win: the last `window` tokens of the window branch, keys rotated.
        k_open, v_open: the unrotated tokens, fewer than cmp_block, from where the next compressed token starts.
    """

    def __init__(self, config: NSAConfig) -> None:
        self.k_cmp, self.v_cmp = Appended(), Appended()
        self.k_slc, self.v_slc = Appended(config.slc_block), Appended(config.slc_block)
        self.k_win, self.v_win = Recent(config.window), Recent(config.window)
        self.k_open: Tensor | None = None
        self.v_open: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens taken in so far: the position of the next one."""
        return self.k_slc.length


class DenseCache:
    """Keys (rotated) and values of one dense layer."""

    def __init__(self) -> None:
        self.k, self.v = Appended(), Appended()

    @property
    def length(self) -> int:
        """Tokens taken in so far: the position of the next one."""
        return self.k.length
