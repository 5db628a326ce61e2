"""Copies the files of points from the artifact store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, check_name
from orchestrator.store import Store, queries


@dataclass(frozen=True)
class StoredFile:
    """A file of a point, as the database describes it.

    Attributes:
        point: the point's index.
        path: relative to the artifact store.
        size: in bytes.
    """

    point: int
    attempt: int
    name: str
    path: str
    size: int
    sha256: str


def files(store: Store, run_id: str, point: int | None) -> list[StoredFile]:
    """The files of a run's points, or of one, latest attempt first."""
    return [StoredFile(**row) for row in queries.files(store, run_id, point).to_dict("records")]


def fetch(url: str, found: Sequence[StoredFile], out: Path) -> list[str]:
    """Copy files to `out`/<point>/<attempt>/<name>, each only if its size and hash are right.

    Returns:
        One line for each file that was not copied.

    Raises:
        ArtifactError: `out` cannot be written.
    """
    store, problems = ArtifactStore(url), []
    for file in found:
        try:
            target = out / f"{file.point:04d}" / str(file.attempt) / check_name(file.name)
            _copy(store, file, target)
        except ArtifactError as err:
            problems.append(str(err))
        except OSError as err:
            raise ArtifactError(
                f"--out: {str(out)!r}: cannot be written ({err.strerror}); name another folder"
            ) from None
    return problems


def _copy(store: ArtifactStore, file: StoredFile, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as out:
            for piece in store.pieces(file.path, file.size, file.sha256):
                out.write(piece)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
