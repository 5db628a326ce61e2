"""Interface of corpora to the training loop, and their common parts: held-out text, windows of tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
    """Batches that `draw` makes by the numbers of a generator alone, whose state is the position in them."""

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
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        packages = {"site-packages", "dist-packages", "__pycache__"}  # have most of the files, and are not entered
        folders[:] = [name for name in folders if not name.startswith(".") and name not in packages]
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


_MOST_BYTES = 64 * 2**20  # most bytes to read; a short run learns nothing from more


@dataclass(frozen=True)
class ByteCorpus:
    """Bytes as uint8 tensors [bytes]; files follow each other, each ended by a zero byte."""

    train: Tensor
    heldout: Tensor  # of files that training never sees
    files: int  # that were read, both parts together
    sha256: str  # of both parts

    def batches(self, batch: int, seq_len: int, seed: int) -> DrawnBatches:
        """Batches from random places."""
        places = len(self.train) - seq_len
        return DrawnBatches(
            lambda generator: windows(self.train, torch.randint(places, (batch,), generator=generator), seq_len),
            torch.Generator().manual_seed(seed),
        )

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return spread_windows(self.heldout, batch, seq_len, count)

    def text_bytes(self, targets: Tensor) -> int:
        return targets.numel()

    def about(self) -> dict[str, Any]:
        sizes = {"train_bytes": len(self.train), "heldout_bytes": len(self.heldout)}
        return {"files": self.files, **sizes, "sha256": self.sha256}


def load_corpus(path: Path | None, heldout: float, seq_len: int) -> ByteCorpus:
    """Read all files below `path`, or the one file there; Python's standard library if it is None.

    Files are held out by their contents alone, so that copies of a file are on the same side, also one that is cut at
    the limit. If there is only one file, its end is held out.

    Raises:
        DataError: a part is too short for `seq_len`.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    files = files_below(root, "*.py" if path is None else "*")
    read = count = 0
    for file in files:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES - read) + b"\0"
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256")  # of the whole file
        digest.update(b"\0")
        if len(files) == 1:
            split = int(len(content) * (1 - heldout))
            parts[False] += content[:split]
            parts[True] += content[split:]
        else:
            parts[is_heldout(digest.digest(), heldout)] += content
        read, count = read + len(content), count + 1
        if read >= _MOST_BYTES:
            break
    for held_out, content in parts.items():
        if len(content) <= seq_len + 1:
            part = "held-out" if held_out else "training"
            problem = f"its {part} part has {len(content)} bytes, too few for seq_len {seq_len}"
            fix = "give more files that differ, one alone, of which the end is held out, or shorten seq_len"
            raise DataError(f"data.path: {str(root)!r}: {problem}; {fix}")
    sha256 = hashlib.sha256(parts[False] + parts[True]).hexdigest()
    train, held = (torch.frombuffer(parts[key], dtype=torch.uint8) for key in (False, True))
    return ByteCorpus(train, held, count, sha256)
