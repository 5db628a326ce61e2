"""Import of results made elsewhere: journals of our own runs, and tables of reported results."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from jobs.schema.plain_text import from_csv_cell, in_a_line, shown
from jobs.schema.states import Origin
from orchestrator.errors import UserError
from orchestrator.store import journal, reported_layouts, writer
from orchestrator.store.models import Run
from orchestrator.store.records import OutcomeRecord, PointRecord, Record, RunRecord
from orchestrator.store.reported import Reader, Row
from orchestrator.store.store import Store

csv.field_size_limit(16 << 20)  # a cell of our own export may hold any text
TABLE_LIMIT = 256 << 20
"""Bytes of a table, whose rows are all read before the first is stored: at most a tenfold of memory."""

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
        UserError: the file cannot be read, its layout is unknown, or one of its lines is wrong.
        StoreUnavailable: the database cannot be reached.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device may have no end, a pipe no beginning
        raise ImportFileError(f"file: '{path}' is no file; give a journal (.jsonl, .jsonl.gz) or a CSV")
    if path.name.endswith((".jsonl", journal.COMPRESSED)):
        return _import_journal(store, path)
    if path.suffix == ".csv":
        return _import_table(store, path)
    raise ImportFileError(f"file: '{path}' is neither .jsonl nor .csv; give a journal (.jsonl, .jsonl.gz) or a CSV")


@dataclass
class _Contents:
    """Counts and beginnings of a journal's runs; the records themselves would take ten times its size in memory."""

    records: int = 0
    points: set[str] = field(default_factory=set)
    metrics: int = 0
    first: dict[str, RunRecord] = field(default_factory=dict)  # beginning of each run
    begun: dict[str, set[datetime]] = field(default_factory=dict)  # times of all of them

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Contents:
        found = cls()
        for record in records:
            found.records += 1
            match record:
                case RunRecord():
                    found.first.setdefault(record.run_id, record)
                    found.begun.setdefault(record.run_id, set()).add(record.at)
                case PointRecord():
                    found.points.add(record.point_id)
                case OutcomeRecord():
                    found.metrics += len(record.metrics)
        return found


def _import_journal(store: Store, path: Path) -> ImportSummary:
    found = _Contents.of(journal.read(path))
    if not found.records:
        raise ImportFileError(f"file: '{path}' holds no records; give the journal of a run")
    with store.session(writes=True) as session:
        for run_id, first in found.first.items():
            _in_turn(session, f"nsa import of {run_id}")
            stored = session.get(Run, run_id)
            if stored is not None and not _same_run(stored, first, found.begun[run_id]):
                raise ImportFileError(
                    f"file: '{path}' is of another run than the {run_id!r} in {store.name}, "
                    f"a {stored.kind} of {stored.created_at:%Y-%m-%d %H:%M:%S} UTC; use another database"
                )
        writer.apply(session, islice(journal.read(path), found.records))  # a run may write on
    return ImportSummary(
        path=path,
        origin=" and ".join(sorted({first.origin.value for first in found.first.values()})) or Origin.MEASURED,
        run_ids=tuple(found.first),
        points=len(found.points),
        metrics=found.metrics,
        unchanged=False,
    )


def _in_turn(session: Session, what: str) -> None:
    """Wait for the end of another import of the same: Postgres would refuse the rows that both found missing."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(what, 0))))


def _same_run(stored: Run, first: RunRecord, begun: Set[datetime]) -> bool:
    """Whether a journal's beginnings can be of the stored run; the first is a resumption if earlier lines are lost."""
    same = (stored.name, stored.kind, stored.origin) == (first.name, first.kind, first.origin)
    return same and (first.resumed > 0 or stored.created_at in begun)


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
    with store.session(writes=True) as session:
        _in_turn(session, "nsa import of tables")
        changed = [run for run, begin in runs if _begun(session, begin)]
        # Points of many runs before their metrics: with the first metric, Postgres plans how it finds their points.
        ended = chain.from_iterable(run.ended() for run in changed)
        while some := list(islice(ended, _AT_ONCE)):
            writer.apply(session, (record for records in zip(*some, strict=True) for record in records))
        for run in changed:
            writer.apply(session, (*run.events(), run.end()))
    points = [point for run, _ in runs for point in run.points]
    metrics = sum(len(point.metrics) for point in points)
    names = tuple(dict.fromkeys(begin.run_id for _, begin in runs))
    return ImportSummary(path, Origin.REPORTED, names, len(points), metrics, unchanged=not changed)


class _Texts(dict[str, str]):
    """The texts of cells, one for all equal ones: most cells of a table repeat others."""

    def __missing__(self, cell: str) -> str:
        return self.setdefault(cell, from_csv_cell(cell))


class _Cells(Mapping[str, str]):
    """A row of a table; a cell or column that is not there is empty."""

    __slots__ = ("_cells", "_places")

    def __init__(self, places: Mapping[str, int], cells: tuple[str, ...]) -> None:
        self._places, self._cells = places, cells

    def __getitem__(self, name: str) -> str:
        place = self._places.get(name, len(self._cells))
        return self._cells[place] if place < len(self._cells) else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _rows(path: Path) -> tuple[Reader, list[Row]]:
    """The rows of a table, each with its file and line, and their reader. Raises ImportFileError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if (size := os.fstat(file.fileno()).st_size) > TABLE_LIMIT:
                raise ImportFileError(
                    f"file: '{path}' has more than {TABLE_LIMIT >> 20} MiB; split it into one file a run"
                )
            reader = csv.reader(file)
            columns = [from_csv_cell(name) for name in next(reader, [])]
            if (read := reported_layouts.layout(columns)) is None:
                raise ImportFileError(
                    f"file: '{path}' has unknown columns ({in_a_line(', '.join(columns[:6])) or 'none'}); use one of "
                    "the layouts in docs/database.md"
                )
            whole = os.pread(file.fileno(), 1, max(0, size - 1)) in (b"\n", b"\r")
            return read, list(_cells(((reader.line_num, cells) for cells in reader), columns, path.name, whole))
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "not text"
        raise ImportFileError(f"file: '{path}' cannot be read ({reason}); give a CSV of reported results") from None
    except csv.Error as err:
        raise ImportFileError(f"file: '{path}' is no CSV ({err}); save it as one") from None


def _cells(numbered: Iterable[tuple[int, list[str]]], columns: list[str], name: str, whole: bool) -> Iterator[Row]:
    """The rows by their columns, each with its place in the file as its column `file`.

    Args:
        whole: whether the last line has an end.

    Raises:
        ImportFileError: it has none, and lacks cells: the file was cut off, perhaps in a number.
    """
    places = {"file": 0} | {column: place for place, column in enumerate(columns, 1) if column not in ("", "file")}
    texts, line, cells = _Texts(), 0, columns
    for line, cells in numbered:
        if cells:
            yield _Cells(places, (f"{name} line {line}", *map(texts.__getitem__, cells)))
    if not whole and len(cells) < len(columns):
        raise ImportFileError(
            f"file: '{name}' ends in line {line}, in the cell {len(cells)} of {len(columns)}; give the whole file"
        )


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
