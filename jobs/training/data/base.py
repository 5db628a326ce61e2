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


_MOST_BYTES = 64 * 2**20  # most bytes to read; a short run learns nothing from more
_PIECE = 2**20  # bytes of the rest of a file to hash at once


@dataclass(frozen=True)
class ByteCorpus:
    """Bytes as uint8 tensors; files follow each other, each ended by a zero byte.

    Attributes:
        train: [bytes] to learn from.
        heldout: [bytes] of files that training never sees.
        files: number of files read, both parts together.
        sha256: digest of both parts.
    """

    train: Tensor
    heldout: Tensor
    files: int
    sha256: str

    def batches(self, batch: int, seq_len: int, seed: int) -> DrawnBatches:
        """Endless (tokens, targets), int64 [batch, seq_len] each, from random places seeded by `seed`."""

        def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
            starts = torch.randint(len(self.train) - seq_len, (batch,), generator=generator)
            return windows(self.train, starts, seq_len)

        return DrawnBatches(draw, torch.Generator().manual_seed(seed))

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed (tokens, targets) as in `batches`, from places spread evenly over the held-out part."""
        return spread_windows(self.heldout, batch, seq_len, count)

    def text_bytes(self, targets: Tensor) -> int:
        """Bytes of text that `targets` stand for: each is one."""
        return targets.numel()

    def about(self) -> dict[str, Any]:
        """Files, sizes of both parts [bytes], and their digest."""
        sizes = {"train_bytes": len(self.train), "heldout_bytes": len(self.heldout)}
        return {"files": self.files, **sizes, "sha256": self.sha256}


def load_corpus(path: Path | None, heldout: float, seq_len: int) -> ByteCorpus:
    """Read all files below `path`, or the one file there; Python's standard library if it is None.

    Files are held out by their contents alone, so that copies of a file are on the same side, also one that is cut at
    the limit. If there is only one file, its end is held out.

    Args:
        heldout: share of the files (of the bytes of a single file) to hold out.
        seq_len: both parts must be longer than this.

    Raises:
        DataError: a part is too short for `seq_len`.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    files = files_below(root, "*.py" if path is None else "*")
    read = count = 0
    for file in files:
        content, sha256 = _beginning(file, _MOST_BYTES - read)
        read, count = read + len(content), count + 1
        if len(files) == 1:
            split = int(len(content) * (1 - heldout))
            parts[False] += content[:split]
            parts[True] += content[split:]
        else:
            parts[is_heldout(sha256, heldout)] += content
        if read >= _MOST_BYTES:
            break
    for held_out, content in parts.items():
        if len(content) <= seq_len + 1:
            raise DataError(f"data.path: {str(root)!r}: {_too_few(held_out, len(content), count, seq_len)}")
    digest = hashlib.sha256(parts[False] + parts[True]).hexdigest()
    train, held = (torch.frombuffer(parts[key], dtype=torch.uint8) for key in (False, True))
    return ByteCorpus(train, held, count, digest)


def _too_few(held_out: bool, size: int, files: int, seq_len: int) -> str:
    """The reason why a part of so many bytes, of some of so many files, is refused, and what to do."""
    part, other = ("held-out", "training") if held_out else ("training", "held-out")
    if files > 1 and not size:
        return (
            f"its {part} part is empty, as the contents of its {files} files put all of them into the {other} part; "
            "give more files that differ, or one alone, of which the end is held out"
        )
    return f"its {part} part has {size} bytes, too few for seq_len {seq_len}; give more text or shorten seq_len"


def _beginning(file: Path, most: int) -> tuple[bytes, bytes]:
    """The first `most` bytes of a file, and the SHA-256 of all of it; both with a zero byte at the end."""
    with file.open("rb") as stream:
        content = stream.read(most)
        digest = hashlib.sha256(content)
        while piece := stream.read(_PIECE):
            digest.update(piece)
    digest.update(b"\0")
    return content + b"\0", digest.digest()
