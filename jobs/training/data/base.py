"""Interface of corpora to the training loop, and their common parts: held-out text, windows of tokens."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class DataError(ValueError):
    """Data that a training cannot learn from. One line: field, value, fix."""


class Batches(Iterator[tuple[Tensor, Tensor]]):
    """Endless (tokens, targets), int64 [batch, seq_len] each, with a position that can be stored and loaded.

    Targets may be IGNORED (nsa_core.loss), equally many in every sequence: losses of micro-batches are averaged.
    """

    @abstractmethod
    def state_dict(self) -> Mapping[str, Any]:
        """The position: tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned; of the same corpus and seed, the same batches follow."""

    def about(self) -> Mapping[str, Any]:
        """Description of the text read so far, for the result's environment."""
        return {}


class Corpus(Protocol):
    """Text to learn from, and text that training never sees."""

    def batches(self, batch: int, seq_len: int, seed: int) -> Batches:
        """Batches to learn from, in an order that `seed` decides."""
        ...

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed (tokens, targets), as Batches has them, of held-out text."""
        ...

    def text_bytes(self, targets: Tensor) -> int:
        """Bytes of text that `targets` stand for; the end of a document counts as one."""
        ...

    def about(self) -> Mapping[str, Any]:
        """Description of the corpus, for the result's environment."""
        ...


class DrawnBatches(Batches):
    """Batches that a random generator draws: its state is the position in them.

    Args:
        draw: (tokens, targets) by the numbers of the generator alone.
    """

    def __init__(self, draw: Callable[[torch.Generator], tuple[Tensor, Tensor]], generator: torch.Generator) -> None:
        self._draw = draw
        self._generator = generator

    def __next__(self) -> tuple[Tensor, Tensor]:
        return self._draw(self._generator)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def is_heldout(sha256: bytes, share: float) -> bool:
    """Whether text is held out: the digest of all of it decides, so that copies of it are on the same side."""
    return int.from_bytes(sha256[:4], "big") < share * 2**32


def files_below(root: Path, pattern: str) -> list[Path]:
    """The file at `root`, or the files below it by name, without installed packages and hidden files."""
    if root.is_file():
        return [root]
    hidden, found = ("site-packages", "dist-packages", "__pycache__"), list[Path]()
    for folder, folders, names in os.walk(root):
        # The others are not entered: packages have most of the files.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in hidden]
        found += (Path(folder, name) for name in names if not name.startswith("."))
    return sorted(path for path in found if path.match(pattern) and path.is_file())


def windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), int64 [starts, seq_len] each, from places in `data` [tokens]."""
    index = starts[:, None] + torch.arange(seq_len + 1)
    window = data[index].long()
    return window[:, :-1], window[:, 1:]


def spread_windows(data: Tensor, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of `windows` from places spread evenly over `data`, which is longer than `seq_len`."""
    starts = torch.linspace(0, len(data) - seq_len - 1, batch * count, dtype=torch.float64).long().view(count, batch)
    return [windows(data, row, seq_len) for row in starts]
