"""Import of results made elsewhere: journals of our own runs, and tables of reported results."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import chain, islice
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from jobs.schema.plain_text import from_csv_cell, in_a_line, shown
from jobs.schema.states import Origin
from orchestrator.database_url import BrokenStoreError, StoreError, StoreUnavailable
from orchestrator.errors import UserError
from orchestrator.store import journal, reported, writer
from orchestrator.store.models import Run
from orchestrator.store.records import OutcomeRecord, PointRecord, RunRecord, now
from orchestrator.store.store import Store

csv.field_size_limit(16 << 20)  # a cell of our own export may hold any text
TABLE_LIMIT = 256 << 20
"""Bytes of a table, whose rows are all read before the first is stored."""

_AT_ONCE = 1_000  # points of a table, with their metrics


class ImportFileError(UserError):
    """The file cannot be imported; the message names it, the mistake and the fix."""


@dataclass(frozen=True)
class ImportSummary:
    """Counts of one imported file; `unchanged`: everything was stored before."""

    path: Path
    origin: str
    run_ids: tuple[str, ...]
    points: int
    metrics: int
    unchanged: bool

    def __str__(self) -> str:
        what = f"{len(self.run_ids)} {self.origin} run(s), {self.points} points, {self.metrics} metrics"
        return f"{self.path}: {what}" + (" (stored before, nothing changed)" if self.unchanged else "")


def import_file(store: Store, path: Path) -> ImportSummary:
    """Store the journal (.jsonl, .jsonl.gz) or reported table (.csv) at `path`; doing it again adds no duplicates.

    Raises:
        UserError: the file cannot be read, its layout is unknown, or one of its lines is wrong: nothing is stored.
        StoreUnavailable: the database cannot be reached.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device may have no end, a pipe no beginning
        raise ImportFileError(f"file: '{path}' is no file; give a journal (.jsonl, .jsonl.gz) or a CSV")
    if path.name.endswith((".jsonl", journal.COMPRESSED)):
        return _import_journal(store, path)
    if path.suffix == ".csv":
        return _import_table(store, path)
    raise ImportFileError(f"file: '{path}' is neither .jsonl nor .csv; give a journal (.jsonl, .jsonl.gz) or a CSV")


def _import_journal(store: Store, path: Path) -> ImportSummary:
    count, run_id, metrics = 0, "", 0
    points: set[str] = set()
    begins: list[RunRecord] = []  # all records would be ten times the journal's size in memory
    for record in journal.read(path):
        count, run_id = count + 1, record.run_id
        match record:
            case RunRecord():
                begins.append(record)
            case PointRecord():
                points.add(record.point_id)
            case OutcomeRecord():
                metrics += len(record.metrics)
    if not count:
        raise ImportFileError(
            f"file: '{path}' holds no records; write it again from the run's database: nsa export RUN --journal"
        )
    if begins and begins[0].at > now() + timedelta(days=1):  # it would be the newest evidence for ever
        raise ImportFileError(
            f"file: '{path}': begins on {begins[0].at:%Y-%m-%d}, in the future; set the clock of its host, or this "
            "one's, and measure again"
        )
    try:
        with _in_turn(store, f"nsa import of {run_id}") as session:
            stored = session.get(Run, run_id)
            if stored is not None and begins and not _same_run(stored, begins):
                raise ImportFileError(
                    f"file: '{path}' is of another run than the {run_id!r} in {store.name}, "
                    f"a {stored.kind} of {stored.created_at:%Y-%m-%d %H:%M:%S} UTC; use another database"
                )
            writer.apply(session, islice(journal.read(path), count))  # a run may write on
    except (StoreUnavailable, BrokenStoreError):
        raise
    except StoreError:
        _apply_each(store, path, count)
    origin = begins[0].origin if begins else Origin.MEASURED
    return ImportSummary(path, origin, (run_id,), len(points), metrics, unchanged=False)


def _same_run(stored: Run, begins: list[RunRecord]) -> bool:
    """Whether a journal's beginnings can be of the stored run; the first is a resumption if earlier lines are lost."""
    first = begins[0]
    same = (stored.name, stored.kind, stored.origin) == (first.name, first.kind, first.origin)
    return same and (first.resumed > 0 or stored.created_at in {begin.at for begin in begins})


def _apply_each(store: Store, path: Path, count: int) -> None:
    """Store the records one by one, so that an error names the line of the one that the database refuses."""
    line = 0
    try:
        with store.session(writes=True) as session:
            for record in islice(journal.read(path), count):
                line += 1
                writer.apply(session, [record])
    except (StoreUnavailable, BrokenStoreError):
        raise
    except StoreError as err:
        raise ImportFileError(f"file: '{path}': line {line}: {err}; nothing of the file is stored") from None


@contextmanager
def _in_turn(store: Store, what: str) -> Iterator[Session]:
    """A session that writes after another import of the same: Postgres would refuse rows that both found missing."""
    with store.session(writes=True) as session:
        if session.get_bind().dialect.name == "postgresql":
            session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(what, 0))))
        yield session


def _import_table(store: Store, path: Path) -> ImportSummary:
    read, rows = _rows(path)
    try:
        runs = [(run, run.begin()) for run in read(rows)]
    except ValidationError as err:  # a text or a number that no column holds
        mistake = err.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, mistake['loc']))}: {shown(mistake['input'])}: {mistake['msg']}"
        raise ImportFileError(f"file: '{path}': {what}; correct the cell") from None
    if not any(run.points or run.notes for run, _ in runs):
        raise ImportFileError(f"file: '{path}' holds no result; give a CSV with a row below its header")
    with _in_turn(store, "nsa import of tables") as session:
        changed = [run for run, begin in runs if _begun(session, begin)]
        # Points of many runs before their metrics: with the first metric, Postgres plans how it finds their points.
        ended = chain.from_iterable(run.ended() for run in changed)
        while some := list(islice(ended, _AT_ONCE)):
            writer.apply(session, chain.from_iterable(zip(*some, strict=True)))
        for run in changed:
            writer.apply(session, (*run.events(), run.end()))
    points = [point for run, _ in runs for point in run.points]
    metrics = sum(len(point.metrics) for point in points)
    names = tuple(dict.fromkeys(begin.run_id for _, begin in runs))
    return ImportSummary(path, Origin.REPORTED, names, len(points), metrics, unchanged=not changed)


def _rows(path: Path) -> tuple[reported.Reader, list[reported.Row]]:
    """The rows of a table, each with its file and line, and their reader. Raises ImportFileError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if (size := os.fstat(file.fileno()).st_size) > TABLE_LIMIT:
                raise ImportFileError(
                    f"file: '{path}' has more than {TABLE_LIMIT >> 20} MiB; split it into one file a run"
                )
            lines = csv.reader(file)
            columns = cells = [from_csv_cell(name) for name in next(lines, [])]
            if (read := reported.layout(columns)) is None:
                raise ImportFileError(
                    f"file: '{path}' has unknown columns ({in_a_line(', '.join(columns[:6])) or 'none'}); use one of "
                    "the layouts in docs/database.md"
                )
            rows = []
            text_of = cache(from_csv_cell)  # one text for all equal cells: most cells of a table repeat others
            for cells in lines:
                if cells:
                    place = f"{path.name} line {lines.line_num}"
                    filled = {name: text_of(cell) for name, cell in zip(columns, cells, strict=False) if cell}
                    rows.append(reported.Row(filled, file=place))
            ended = os.pread(file.fileno(), 1, max(0, size - 1)) in (b"\n", b"\r")
            if not ended and len(cells) < len(columns):  # cut off, perhaps in a number
                raise ImportFileError(
                    f"file: '{path.name}' ends in line {lines.line_num}, in the cell {len(cells)} of {len(columns)}; "
                    "give the whole file"
                )
            return read, rows
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "not text"
        raise ImportFileError(f"file: '{path}' cannot be read ({reason}); give a CSV of reported results") from None
    except csv.Error as err:
        raise ImportFileError(f"file: '{path}' is no CSV ({err}); save it as one") from None


def _begun(session: Session, begin: RunRecord) -> bool:
    """Whether a reported run is new or changed: its beginning is stored then, an older version with its points gone."""
    stored = session.get(Run, begin.run_id)  # as a record holds it
    if stored is not None and stored.spec_hash == begin.spec_hash:
        return False
    if stored is not None:
        session.delete(stored)
        session.flush()
    writer.apply(session, [begin])
    return True
