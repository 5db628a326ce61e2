"""The journal: a run's records, one JSON object per line, append-only, synced to disk before any other use.

A process that dies while writing leaves a torn last line; readers skip it, and the next writer removes it.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from orchestrator.errors import UserError
from orchestrator.records import RECORD, Record

NAME = "journal.jsonl"
COMPRESSED = ".jsonl.gz"  # the suffix of a journal as an archive: it can be read, not continued
EXPANDED_LIMIT = 256 << 20  # bytes; a hundred times the journal of a sweep of a hundred points
_POINT = re.compile(r"\d+")  # a point's id is <run id>/<number>


class JournalError(UserError):
    """The journal cannot be used; one line: field, value, fix."""


class Journal:
    """The journal of one run, locked for appending by this process."""

    def __init__(self, path: Path) -> None:
        """Create the journal, or open an existing one and remove its torn last line.

        Raises:
            JournalError: the file cannot be written, or another process is writing it.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as err:
            raise JournalError(
                f"NSA_ARTIFACTS: {str(path.parent)!r}: cannot be written ({err.strerror}); name another folder"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise JournalError(
                f"journal: {str(path)!r}: is being written by another process; stop that run first (nsa cancel)"
            ) from None
        self._file.truncate(_whole(path))
        self._file.seek(0, os.SEEK_END)
        _sync_folder(path.parent)

    def append(self, records: Iterable[Record]) -> None:
        """Append records and sync them to disk."""
        lines = b"".join(RECORD.dump_json(record) + b"\n" for record in records)
        self._file.write(lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Iterator[Record]:
    """Records of a journal, plain or compressed by gzip (.jsonl.gz), in order, without a torn last line.

    Raises:
        JournalError: the file cannot be read, expands to more than EXPANDED_LIMIT, a line before the last is not a
            record, or a record names a point of another run.
    """
    for number, line in enumerate(_lines(path), start=1):
        if not line.endswith(b"\n"):
            return
        yield _record(path, number, line)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines with their ends. Raises JournalError."""
    try:
        if path.name.endswith(COMPRESSED):
            yield from _expanded(path)
            return
        with path.open("rb") as file:
            yield from file
    except (gzip.BadGzipFile, zlib.error, EOFError) as err:
        raise JournalError(f"journal: {str(path)!r}: is not whole gzip ({err}); compress the journal again") from None
    except OSError as err:
        raise JournalError(f"journal: {str(path)!r}: cannot be read ({err.strerror}); give a journal.jsonl") from None


def _expanded(path: Path) -> Iterator[bytes]:
    left = EXPANDED_LIMIT
    with gzip.open(path) as file:
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise JournalError(
                    f"journal: {str(path)!r}: expands to more than {EXPANDED_LIMIT >> 20} MiB; if it is a journal "
                    "indeed, expand it first and give the journal.jsonl"
                )
            yield line


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        record = RECORD.validate_json(line)
    except ValidationError as err:
        mistake = err.errors(include_url=False)[0]
        what = ": ".join(filter(None, [".".join(map(str, mistake["loc"])), mistake["msg"]]))
        raise JournalError(
            f"journal: {str(path)!r}: line {number} is no record ({what}); remove the line, or move the file away: "
            "--resume then writes it again from the database"
        ) from None
    point_id: str | None = getattr(record, "point_id", None)
    if point_id is not None and not _POINT.fullmatch(point_id.removeprefix(f"{record.run_id}/")):
        raise JournalError(
            f"journal: {str(path)!r}: line {number} names the point {point_id!r}, which is not one of its run "
            f"{record.run_id!r}; give the journal as the run wrote it"
        )
    return record


def _whole(path: Path) -> int:
    """The file's size in bytes up to the end of its last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new file's entry survives a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
