"""The journal, and the thread that brings it into the database.

A journal has a run's records, one JSON object per line, append-only, synced to disk before anything else happens with
them. The thread begins at its beginning: what is stored already changes nothing, so that a resumed run brings in what
the database has missed. Measuring never waits for it.

A process that dies while writing leaves a torn last line; readers skip it, and the next writer removes it. A disk that
takes no more leaves the journal as it was before.
"""

import contextlib
import fcntl
import gzip
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from jobs.schema.plain_text import in_a_line
from jobs.specs.user_files import open_regular
from orchestrator.database_url import SETTING, RunMissingError, StoreError, StoreUnavailable
from orchestrator.errors import UserError
from orchestrator.store.records import RECORD, EventRecord, Progress, Record
from orchestrator.store.store import RENEW_S, Store

NAME = "journal.jsonl"
COMPRESSED = ".jsonl.gz"  # the suffix of a journal as an archive: it can be read, not continued
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")  # a point's id is <run id>/<index>
_REASON = 300  # characters
_UNREADABLE = "journal: {!r}: cannot be read ({}); give a journal.jsonl"
TIMEOUT_S = 30.0  # seconds without an answer of the database after which the end of a run waits for it no longer
STOP_S = 0.8  # the same for a run that was stopped: Ray kills a stopped job after three seconds
_SLOW_S = 1.5  # without an answer, after which the user hears of it
_BATCH = 50  # records of a transaction: few, so that a database which works answers within a second
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 10.0


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

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Recorder(AbstractContextManager["Recorder"]):
    """Journal and database of one run; `tell` shows a line to the user."""

    def __init__(self, run_id: str, journal: Journal, store: Store, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self._run_id, self._journal, self._store = run_id, journal, store
        self._wake, self._closing = threading.Event(), threading.Event()
        self._away_since: float | None = None  # as the user knows
        self._refusal_noted = False
        # Written by the thread:
        self._offset = 0  # byte of the journal up to which its records are stored
        self._beats: dict[str, Progress] = {}  # point id -> its latest: only the present matters
        self._away: str | None = None  # why the database cannot be used now
        self._refused: str | None = None  # why it accepts nothing of this run any more
        self._asked_at: float | None = None  # when the question was put that it has not answered
        self._answered_at = time.monotonic()
        self._renewed_at = float("-inf")
        self._thread = threading.Thread(target=self._follow, name="database", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Store the rest, and end the lease and the thread; one that the database keeps waiting is abandoned."""
        self._closing.set()
        self._wake.set()
        self._thread.join(STOP_S)

    @property
    def stored(self) -> bool:
        """Whether all records are in the database."""
        return self._offset == self._journal.end

    def write(self, records: Sequence[Record]) -> None:
        """Append records to the journal: they are on disk when this returns, and in the database soon.

        Raises JournalFull.
        """
        self._journal.append(records)
        self._wake.set()
        self.look()

    def progress(self, sign: Progress) -> None:
        """Show a running point's progress in the database, unless that is away."""
        if self._away is None:
            self._beats[sign.point_id] = sign
            self._wake.set()

    def look(self) -> None:
        """Say what has changed about the database; to be called several times a second. Raises JournalFull."""
        if self._refused is not None:
            if not self._refusal_noted:
                self._refusal_noted = True
                self._note("error", f"the database no longer follows this run: {self._refused}")
            return
        away, asked = self._away, self._asked_at
        if away is None and asked is not None and (silent_s := time.monotonic() - asked) > _SLOW_S:
            away = f"{SETTING}: {self._store.name!r}: has not answered for {silent_s:.1f} s"
        if away is not None and self._away_since is None:
            self._away_since = time.monotonic()
            self.tell(f"warning: {away}; results go to the journal and are stored when it is back")
        elif away is None and self._away_since is not None and self._answered_at > self._away_since:
            seconds, self._away_since = time.monotonic() - self._away_since, None
            self._note("warning", f"the database was away for {seconds:.0f} s; the missed records are being stored")

    def close(self, patience_s: float = TIMEOUT_S, stopped: Callable[[], str | None] = lambda: None) -> list[str]:
        """Wait until all records are stored; give up when none was for `patience_s` seconds, once `stopped` for STOP_S.

        Returns a line for the user about records that the database lacks, with the fix.
        """
        begun = time.monotonic()
        while not (self.stored and self._away_since is None):
            self.look()
            waited_s = time.monotonic() - max(begun, self._answered_at)
            if self._refused or waited_s >= (min(patience_s, STOP_S) if stopped() else patience_s):
                break
            time.sleep(0.02)
        if self.stored:
            return []
        return [f"records are missing from the database; store them with: nsa import {self._journal.path}"]

    def _note(self, level: Literal["warning", "error"], message: str) -> None:
        self.tell(f"{level}: {message}")
        self.write([EventRecord(run_id=self._run_id, level=level, message=message)])

    def _follow(self) -> None:
        """The thread: bring the database up to date whenever the journal has grown, and renew the run's lease."""
        retry_s = _FIRST_RETRY_S
        while self._refused is None:
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._asked_at = time.monotonic()
                self._bring_up_to_date()
                if closing:
                    self._store.end_lease(self._run_id)
                self._away, retry_s = None, _FIRST_RETRY_S
            except StoreUnavailable as err:
                self._away = str(err)
                self._beats.clear()
                self._renewed_at = float("-inf")  # by which it is noticed that the database is back
                if not closing:
                    self._closing.wait(retry_s)
                    self._wake.set()
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
            except (StoreError, JournalError) as err:
                self._refused = str(err)
            except Exception as err:  # a bug of ours: the journal keeps the run
                self._refused = f"{type(err).__name__}: {err}"
            finally:
                self._asked_at = None
            if closing:
                return
            self._wake.wait(RENEW_S)

    def _bring_up_to_date(self) -> None:
        store = self._store
        while self._offset < self._journal.end:
            records, end = self._journal.records(self._offset, _BATCH)
            try:
                store.apply_many(records)
            except RunMissingError:
                if self._offset == 0:
                    raise
                self._offset = 0  # the database was replaced by an older or empty one: it gets the whole journal
                raise StoreUnavailable(f"{SETTING}: {store.name!r}: has lost this run") from None
            self._offset = end
            self._asked_at = self._answered_at = time.monotonic()
        if self._offset and time.monotonic() - self._renewed_at > RENEW_S:  # before, the run has no row
            store.take_lease(self._run_id)
            self._renewed_at = time.monotonic()
            self._asked_at = self._answered_at = time.monotonic()
        while self._beats:
            _, sign = self._beats.popitem()
            try:
                store.beat(sign)
            except StoreUnavailable:
                raise
            except StoreError:  # a number of steps that it cannot hold: a later sign follows
                continue
            self._asked_at = self._answered_at = time.monotonic()


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
