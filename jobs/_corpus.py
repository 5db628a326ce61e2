"""A corpus of bytes: text files split into training and held-out files, and seeded batches of them.

The default corpus, the sources of Python's standard library, is on every machine.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MOST_BYTES = 64 * 2**20  # most bytes to read; a short run learns nothing from more


@dataclass(frozen=True)
class Corpus:
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

    def batches(self, batch: int, seq_len: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (tokens, targets), int64 [batch, seq_len] each, from random places seeded by `seed`."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - seq_len, (batch,), generator=generator)
            yield _windows(self.train, starts, seq_len)

    def heldout_batches(self, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed (tokens, targets) as in `batches`, from places spread evenly over the held-out part."""
        last = len(self.heldout) - seq_len - 1
        starts = torch.linspace(0, last, batch * count, dtype=torch.float64).long().view(count, batch)
        return [_windows(self.heldout, row, seq_len) for row in starts]


def load_corpus(path: Path | None, heldout: float, seq_len: int) -> Corpus:
    """Read all files below `path`, or the one file there; Python's standard library if it is None.

    Files are held out by their contents alone, so that copies of a file are on the same side. If there is only one
    file, its end is held out.

    Args:
        heldout: share of the files (of the bytes of a single file) to hold out.
        seq_len: both parts must be longer than this.

    Raises:
        ValueError: a part is too short for `seq_len`.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    parts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    files = _files(root, "*.py" if path is None else "*")
    read = count = 0
    for file in files:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES - read) + b"\0"
        read, count = read + len(content), count + 1
        if len(files) == 1:
            split = int(len(content) * (1 - heldout))
            parts[False] += content[:split]
            parts[True] += content[split:]
        else:
            parts[_is_heldout(content, heldout)] += content
        if read >= _MOST_BYTES:
            break
    for is_heldout, content in parts.items():
        if len(content) <= seq_len + 1:
            part = "held-out" if is_heldout else "training"
            raise ValueError(
                f"data.path: {str(root)!r}: its {part} part has {len(content)} bytes, too few for seq_len {seq_len}; "
                "give more text or shorten seq_len"
            )
    digest = hashlib.sha256(parts[False] + parts[True]).hexdigest()
    train, held = (torch.frombuffer(parts[key], dtype=torch.uint8) for key in (False, True))
    return Corpus(train, held, count, digest)


def _files(root: Path, pattern: str) -> list[Path]:
    """Files by name, without installed packages and hidden files."""
    if root.is_file():
        return [root]
    found = (p for p in root.rglob(pattern) if p.is_file())
    skipped = ("site-packages", "dist-packages", "__pycache__")
    return sorted(
        p for p in found if not any(part in skipped or part.startswith(".") for part in p.relative_to(root).parts)
    )


def _is_heldout(content: bytes, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big") < share * 2**32


def _windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(seq_len + 1)
    window = data[index].long()
    return window[:, :-1], window[:, 1:]
