"""Corpora: their batches and held-out text, windows, and the corpus of a text's bytes."""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.training.data.spec import DataSpec
from nsa_core.loss import IGNORED

FEW = 20  # files, of which chance may hold out none, or all
_MOST_BYTES = 64 * 2**20  # most bytes to read; a short run learns nothing from more


class DataError(ValueError):
    """Data that a training cannot learn from. One line: field, value, fix."""


class Batches(Iterator[tuple[Tensor, Tensor]]):
    """Endless (tokens, targets), int64 [batch, seq_len] each, with a position that can be stored and loaded.

    Targets may be IGNORED (nsa_core.loss), equally many in every sequence: losses of micro-batches are averaged. These
    are drawn by the numbers of a generator alone, whose state is the position; a subclass has another one.
    """

    def __init__(self, draw: Callable[[torch.Generator], tuple[Tensor, Tensor]], generator: torch.Generator) -> None:
        self._draw, self._generator = draw, generator
        self.about: dict[str, int] = {}  # description of the text read so far, for the result's environment

    def __next__(self) -> tuple[Tensor, Tensor]:
        return self._draw(self._generator)

    def state_dict(self) -> dict[str, Any]:
        """The position: tensors and plain values."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that `state_dict` returned; of the same corpus and seed, the same batches follow."""
        self._generator.set_state(state["generator"])


@dataclass(frozen=True)
class Corpus:
    """Text of a training: batches to learn from, and a held-out part."""

    batches: Batches  # to learn from
    heldout: list[tuple[Tensor, Tensor]]  # fixed batches of text that training never sees
    about: Mapping[str, Any]  # for the result's environment; checkpoints know the text by it
    token_bytes: Tensor | None = None  # bytes of text that each token stands for; None: one
    end_token: int | None = None  # of documents that do not see each other

    def tokens_a_byte(self, targets: Tensor) -> float:
        """Factor from a mean over targets to one over the bytes of their text."""
        counted = targets[targets != IGNORED]
        return 1.0 if self.token_bytes is None else len(counted) / int(self.token_bytes[counted].sum())


def load_bytes(spec: DataSpec, batch: int, seq_len: int, seed: int) -> Corpus:
    """Bytes of files, from random places that `seed` decides. Raises DataError if there are too few."""
    train, heldout, about = split_bytes(spec.path, spec.heldout, seq_len)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return _windows(train, torch.randint(len(train) - seq_len, (batch,), generator=generator), seq_len)

    batches = Batches(draw, torch.Generator().manual_seed(seed))
    return Corpus(batches, spread_windows(heldout, batch, seq_len, spec.heldout_batches), about)


def split_bytes(path: Path | None, share: float, seq_len: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Bytes to learn from and held-out ones, uint8 [bytes] each, and what is said of them.

    Of all files below `path`, or the one file there, or Python's standard library if it is None; each ends with a zero
    byte. Raises DataError: a part is too short for `seq_len`.
    """
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    train, heldout = bytearray(), bytearray()
    files = files_below(root, "*.py" if path is None else "*")
    read = count = 0
    digests: set[bytes] = set()
    for file in files:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES - read) + b"\0"
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256")  # of the whole file
        digest.update(b"\0")
        digests.add(digest.digest())
        start = heldout_at(content, digest.digest(), share, len(files) < FEW)
        train += content[:start]
        heldout += content[start:]
        read, count = read + len(content), count + 1
        if read >= _MOST_BYTES:
            break
    for part, content in (("training", train), ("held-out", heldout)):
        if len(content) <= seq_len + 1:
            problem = f"its {part} part has {len(content)} bytes, too few for seq_len {seq_len}"
            fix = "give more text, another share in data.heldout, or shorten seq_len"
            if len(digests) == 1 and count >= FEW:
                problem, fix = f"its {count} files are copies, all on one side", "give different ones, or one alone"
            raise DataError(f"data.path: {str(root)!r}: {problem}; {fix}")
    about: dict[str, Any] = {"files": count, "train_bytes": len(train), "heldout_bytes": len(heldout)}
    about["sha256"] = hashlib.sha256(train + heldout).hexdigest()
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(heldout, dtype=torch.uint8), about


def held_out(spec: DataSpec, seq_len: int) -> str:
    """The held-out part of a text, in words. Raises DataError if a part is too short for `seq_len`."""
    share = f"{spec.heldout:.3g} of"
    if spec.tokenized:
        few = spec.path is not None and few_texts(spec.path)
        return f"{share} each file, its end" if few else f"{share} the documents, by their contents"
    train, heldout, about = split_bytes(spec.path, spec.heldout, seq_len)
    files = about["files"]
    how = "the end of the file" if files == 1 else f"the end of each of {files} files"
    how = how if files < FEW else "whole files, by their contents"
    return f"{len(heldout):,} of {len(train) + len(heldout):,} bytes: {how}"


def few_texts(path: Path) -> bool:
    """Whether documents are split themselves: so few files, each a document, that all may fall on one side."""
    suffixes = [Path(file.name.removesuffix(".gz")).suffix for file in files_below(path, "*")]
    return 0 < suffixes.count(".txt") < FEW  # documents of other kinds are refused beside them, other files not read


def heldout_at(text: str | bytes, sha256: bytes, share: float, few: bool) -> int:
    """Where the held-out part of a text begins; what comes before is learned.

    Of few texts the end of each is, else whole ones: the digest of all of it decides, so that copies of a text are on
    the same side, also one that was cut at a limit.
    """
    if few:
        return int(len(text) * (1 - share))
    return 0 if int.from_bytes(sha256[:4], "big") < share * 2**32 else len(text)


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


def spread_windows(data: Tensor, batch: int, seq_len: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches from places spread evenly over `data` [tokens], which is longer than `seq_len`."""
    starts = torch.linspace(0, len(data) - seq_len - 1, batch * count, dtype=torch.float64).long().view(count, batch)
    return [_windows(data, row, seq_len) for row in starts]


def _windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    window = data[starts[:, None] + torch.arange(seq_len + 1)].long()
    return window[:, :-1], window[:, 1:]
