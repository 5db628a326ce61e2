"""Import of results made elsewhere: journals of our own runs, and tables of reported results."""

import csv
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy.orm import Session

from jobs.schema.plain_text import from_csv_cell, in_a_line, shown
from jobs.schema.states import Origin
from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.errors import UserError
from orchestrator.store import journal, reported
from orchestrator.store.models import Run
from orchestrator.store.records import OutcomeRecord, PointRecord, Record, RunRecord, now
from orchestrator.store.store import Store, apply

_CLOCKS_APART = timedelta(minutes=10)  # of two hosts, at most: a clock further ahead has another zone, or was never set
csv.field_size_limit(16 << 20)  # a cell of our own export may hold any text


def import_file(store: Store, path: Path) -> str:
    """Store the journal (.jsonl, .jsonl.gz) or reported table (.csv) at `path`; doing it again adds no duplicates.

    Returns what the file holds, in words. Raises UserError if it cannot be read, or one of its lines is wrong: nothing
    is stored; StoreUnavailable.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a device may have no end, a pipe no beginning
        raise UserError(f"file: '{path}' is no file; give a journal (.jsonl, .jsonl.gz) or a CSV")
    if path.name.endswith((".jsonl", journal.COMPRESSED)):
        return _import_journal(store, path)
    if path.suffix == ".csv":
        return _import_table(store, path)
    raise UserError(f"file: '{path}' is neither .jsonl nor .csv; give a journal (.jsonl, .jsonl.gz) or a CSV")


def _import_journal(store: Store, path: Path) -> str:
    metrics, run_id, origin = 0, "", Origin.MEASURED
    points: set[str] = set()

    def noting(session: Session) -> Iterator[Record]:
        """The records, which would need ten times the journal's size in memory together."""
        nonlocal metrics, run_id, origin
        latest = now() + _CLOCKS_APART
        for record in journal.read(path):
            if record.at > latest:  # it would be the newest evidence for as long
                raise UserError(
                    f"file: '{path}': has a record of {record.at:%Y-%m-%d %H:%M} UTC, in the future; set the clock of "
                    "its host, or this one's, and measure again, or import it later"
                )
            match record:
                case RunRecord():
                    if not run_id:
                        _check_first(session, record, path, store.name)
                    origin = record.origin
                case PointRecord():
                    points.add(record.point_id)
                case OutcomeRecord():
                    metrics += len(record.metrics)
            run_id = record.run_id
            yield record

    try:
        with store.session(writes=True) as session:
            apply(session, noting(session))
    except StoreUnavailable:
        raise
    except StoreError as err:
        raise UserError(f"file: '{path}': {err}; nothing of the file is stored") from None
    if not run_id:
        raise UserError(
            f"file: '{path}' holds no records; write it again from the run's database: nsa export RUN --journal"
        )
    return f"{path}: 1 {origin} run(s), {len(points)} points, {metrics} metrics"


def _check_first(session: Session, first: RunRecord, path: Path, database: str) -> None:
    """Raise UserError if a journal's first record cannot be of the run that is stored under its id."""
    stored = session.get(Run, first.run_id)
    if stored is None:
        return
    same = (stored.name, stored.kind, stored.origin) == (first.name, first.kind, first.origin)
    # A journal that begins with a resumption has lost its earlier lines.
    if not same or not (first.resumed or stored.created_at == first.at):
        raise UserError(
            f"file: '{path}' is of another run than the {first.run_id!r} in {database}, "
            f"a {stored.kind} of {stored.created_at:%Y-%m-%d %H:%M:%S} UTC; use another database"
        )


def _import_table(store: Store, path: Path) -> str:
    read, rows = _rows(path)
    try:
        runs = [(run, run.records()) for run in read(rows)]
    except ValidationError as err:  # a text or a number that no column holds
        mistake = err.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, mistake['loc']))}: {shown(mistake['input'])}: {mistake['msg']}"
        raise UserError(f"file: '{path}': {what}; correct the cell") from None
    if not any(run.points or run.notes for run, _ in runs):
        raise UserError(f"file: '{path}' holds no result; give a CSV with a row below its header")
    unchanged = True
    with store.session(writes=True) as session:
        for run, records in runs:
            stored, begin = session.get(Run, run.run_id), records[0]
            if stored is not None and isinstance(begin, RunRecord):
                if stored.spec_hash == begin.spec_hash:
                    continue
                session.delete(stored)  # an older version, with its points
                session.flush()
            unchanged = False
            apply(session, records)
    points = [outcome for run, _ in runs for _, outcome in run.points]
    metrics = sum(len(outcome.metrics) for outcome in points)
    number = len({run.run_id for run, _ in runs})
    what = f"{path}: {number} reported run(s), {len(points)} points, {metrics} metrics"
    return what + (" (stored before, nothing changed)" if unchanged else "")


def _rows(path: Path) -> tuple[reported.Reader, list[reported.Row]]:
    """The rows of a table, each with its file and line, and their reader. Raises UserError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            columns = cells = [from_csv_cell(name) for name in next(lines, [])]
            read = next((reader for known, reader in reported.LAYOUTS if known <= set(columns)), None)
            if read is None:
                raise UserError(
                    f"file: '{path}' has unknown columns ({in_a_line(', '.join(columns[:6])) or 'none'}); use one of "
                    "the layouts in docs/database.md"
                )
            if twice := next((name for name in columns if name and columns.count(name) > 1), None):
                raise UserError(f"file: '{path.name}' line 1: {twice!r}: is named twice; rename or remove one")
            rows = []
            text_of = cache(from_csv_cell)  # one text for all equal cells: most cells of a table repeat others
            for cells in lines:
                place = f"{path.name} line {lines.line_num}"
                if len(cells) > len(columns):  # 1,095 without quotes was stored as 1, and all after it one column off
                    raise UserError(
                        f"file: '{path.name}' line {lines.line_num}: {shown(','.join(cells))}: has {len(cells)} cells "
                        f"for {len(columns)} columns; quote the comma in a cell"
                    )
                filled = {name: text_of(cell) for name, cell in zip(columns, cells, strict=False) if cell}
                rows += [reported.Row(filled, file=place)] if cells else []
            ended = os.pread(file.fileno(), 1, max(0, os.fstat(file.fileno()).st_size - 1)) in (b"\n", b"\r")
            if not ended and len(cells) < len(columns):  # cut off, perhaps in a number
                raise UserError(
                    f"file: '{path.name}' ends in line {lines.line_num}, in the cell {len(cells)} of {len(columns)}; "
                    "give the whole file"
                )
            return read, rows
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        reason = err.strerror if isinstance(err, OSError) else in_a_line(err)
        raise UserError(f"file: '{path}' cannot be read ({reason}); give a CSV of reported results") from None
