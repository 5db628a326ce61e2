"""The journal: a run's records, one JSON object per line, append-only, synced to disk before any other use.

A process that dies while writing leaves a torn last line; readers skip it, and the next writer removes it. A disk that
takes no more leaves the journal as it was before.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import ValidationError

from jobs.schema.plain_text import in_a_line
from jobs.specs.user_files import open_regular
from orchestrator.errors import UserError
from orchestrator.store.records import RECORD, Record

NAME = "journal.jsonl"
COMPRESSED = ".jsonl.gz"  # the suffix of a journal as an archive: it can be read, not continued
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")  # a point's id is <run id>/<index>
_REASON = 300  # characters
_UNREADABLE = "journal: {!r}: cannot be read ({}); give a journal.jsonl"


class JournalError(UserError):
    """The journal cannot be used; one line: field, value, fix."""


class JournalHeld(JournalError):  # noqa: N818  (a temporary condition, not a mistake)
    """Another process is writing the journal."""


class JournalFull(JournalError):  # noqa: N818  (a temporary condition, not a mistake)
    """The journal's disk takes no more now, or the journal is not in its place; it is as it was before."""


class Journal(AbstractContextManager["Journal"]):
    """The journal of one run, locked for appending by this process; one thread may append while another reads."""

    def __init__(self, path: Path) -> None:
        """Create the journal, or open one and remove its torn last line. Raises JournalHeld, JournalError."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as err:
            problem = f"cannot be written ({err.strerror}); name another folder"
            raise JournalError(f"NSA_ARTIFACTS: {str(path.parent)!r}: {problem}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise JournalHeld(
                f"journal: {str(path)!r}: is being written by another process; stop that run first (nsa cancel)"
            ) from None
        try:
            with open_regular(path) as file:
                self.end = file.read().rfind(b"\n") + 1  # in bytes; all records up to here are on disk
        except OSError as err:
            raise JournalError(_UNREADABLE.format(str(path), err.strerror)) from None
        self._file.truncate(self.end)
        folder = os.open(path.parent, os.O_RDONLY)  # synced, so that a new file's entry survives a power cut
        os.fsync(folder)
        os.close(folder)

    def append(self, records: Iterable[Record]) -> None:
        """Append records and sync them to disk: all of them or none. Raises JournalFull."""
        lines = b"".join(RECORD.dump_json(record) + b"\n" for record in records)
        fd, remaining = self._file.fileno(), memoryview(lines)
        try:
            if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(fd))):
                problem = "was moved away or removed by another process; put it back"
                raise JournalFull(f"journal: {str(self.path)!r}: {problem}")
            self._file.truncate(self.end)  # what an earlier call could neither write in full nor remove
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            os.fsync(fd)
        except OSError as err:
            with contextlib.suppress(OSError):
                self._file.truncate(self.end)
            problem = f"cannot be written ({err.strerror}); free space there"
            raise JournalFull(f"journal: {str(self.path)!r}: {problem}") from None
        self.end += len(lines)

    def records(self, start: int, most: int) -> tuple[list[Record], int]:
        """At most `most` records from byte `start` on, where a record begins, and the byte after them."""
        records, place = [], start
        with self.path.open("rb") as file:
            file.seek(start)
            while place < self.end and len(records) < most:
                line = file.readline()
                if not line.endswith(b"\n"):
                    raise JournalError(f"journal: {str(self.path)!r}: was changed by another process; leave it alone")
                records.append(RECORD.validate_json(line))
                place += len(line)
        return records, place

    def count(self, start: int) -> int:
        """The number of records from byte `start` on."""
        return os.pread(self._file.fileno(), self.end - start, start).count(b"\n")

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Iterator[Record]:
    """Records of a journal, plain or compressed by gzip (.jsonl.gz), in order, without a torn last line.

    Raises JournalError if the file cannot be read, a whole line is no record, or a record is of another run.
    """
    run_id, number = None, 0
    try:
        with open_regular(path) as raw, gzip.open(raw) if path.name.endswith(COMPRESSED) else raw as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                record = RECORD.validate_json(line)
                run_id = record.run_id if run_id is None else run_id
                point_id = getattr(record, "point_id", None)
                index = point_id and point_id.removeprefix(f"{run_id}/")
                if record.run_id != run_id or (index and not _INDEX.fullmatch(index)):
                    raise JournalError(
                        f"journal: {str(path)!r}: line {number} is of {point_id or record.run_id!r}, in the journal of "
                        f"{run_id!r}; give the journal as the run wrote it"
                    )
                yield record
    except ValidationError as err:
        mistake = err.errors(include_url=False)[0]
        what = in_a_line(": ".join(filter(None, [".".join(map(str, mistake["loc"])), mistake["msg"]])), _REASON)
        raise JournalError(
            f"journal: {str(path)!r}: line {number} is no record ({what}); remove the line, or move the file away "
            "and write it again from the database: nsa export RUN --journal"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as err:
        raise JournalError(f"journal: {str(path)!r}: is not whole gzip ({err}); compress the journal again") from None
    except OSError as err:
        raise JournalError(_UNREADABLE.format(str(path), err.strerror)) from None
