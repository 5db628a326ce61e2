"""The content of a point's file, as its record describes it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from orchestrator.store.records import STORED_BYTES, ArtifactData

_TEXTS = frozenset({".txt", ".log", ".json", ".csv", ".md", ".yaml"})


class Content:
    """Content of a file, taken in pieces: its size [bytes] and digest, and of a text the end."""

    def __init__(self) -> None:
        self.size = 0
        self._digest, self._tail = hashlib.sha256(), b""

    def add(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._tail = piece if len(piece) >= STORED_BYTES else (self._tail + piece)[-STORED_BYTES:]
        self.size += len(piece)

    def described(self, name: str, path: str) -> ArtifactData:
        """The description of the file with this content; its name says whether it is a text."""
        text = Path(name).suffix in _TEXTS
        return ArtifactData(
            name=name,
            path=path,
            size=self.size,
            sha256=self._digest.hexdigest(),
            content=self._tail[-STORED_BYTES:].decode(errors="replace").replace("\0", "\\0") if text else None,
            truncated=text and self.size > STORED_BYTES,
        )
