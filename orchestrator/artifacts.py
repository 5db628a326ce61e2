"""A point's files: whole in the run's folder, their end in the journal and the database, to be read from any host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from orchestrator.records import ArtifactData

STORED_BYTES = 64 << 10


def save(folder: Path, index: int, attempt: int, files: Mapping[str, str]) -> tuple[ArtifactData, ...]:
    """Write `files` (name -> text) to `folder`/<index>/<attempt>/ and describe them."""
    if not files:
        return ()
    place = Path(f"{index:04d}") / str(attempt)
    (folder / place).mkdir(parents=True, exist_ok=True)
    return tuple(_save(folder, place / Path(name).name, text) for name, text in sorted(files.items()))


def _save(folder: Path, path: Path, text: str) -> ArtifactData:
    data = text.encode(errors="replace")
    (folder / path).write_bytes(data)
    # Postgres takes no NUL in a text; what a process printed may hold some.
    content = data[-STORED_BYTES:].decode(errors="replace").replace("\0", "\\0")
    return ArtifactData(
        name=path.name,
        path=path.as_posix(),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        content=content,
        truncated=len(data) > STORED_BYTES,
    )
