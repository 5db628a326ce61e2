"""Files of a point: complete in the run's folder, their last 64 KiB in the journal and the database."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from orchestrator.records import ArtifactData

STORED_BYTES = 64 << 10


def save(folder: Path, index: int, attempt: int, files: Mapping[str, str]) -> tuple[ArtifactData, ...]:
    """Write `files` (name -> text) to `folder`/<index>/<attempt>/ and return their descriptions."""
    if not files:
        return ()
    place = Path(f"{index:04d}") / str(attempt)
    (folder / place).mkdir(parents=True, exist_ok=True)
    return tuple(_save(folder, place / Path(name).name, text) for name, text in sorted(files.items()))


def _save(folder: Path, path: Path, text: str) -> ArtifactData:
    data = text.encode(errors="replace")
    (folder / path).write_bytes(data)
    # Postgres rejects NUL in text; captured output may contain it.
    content = data[-STORED_BYTES:].decode(errors="replace").replace("\0", "\\0")
    return ArtifactData(
        name=path.name,
        path=path.as_posix(),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        content=content,
        truncated=len(data) > STORED_BYTES,
    )
