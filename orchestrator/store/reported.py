"""Records from tables of reported figures: measurements, failures, and unmeasured targets.

The header identifies a file's layout. Reported runs have origin `reported` and the dates of the report; they are
never fitted together with measured ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from jobs.schema.plain_text import shown
from jobs.schema.states import Origin, PointState, RunState
from orchestrator.errors import UserError
from orchestrator.store.records import (
    EventRecord,
    MetricData,
    OutcomeRecord,
    PointRecord,
    RunEndRecord,
    RunRecord,
)

Row = Mapping[str, str]
_WHOLE = 2**63 - 1024  # the largest that a float has below 2**63


class ReportedError(UserError):
    """The table cannot be imported; the message names file and line, value and fix."""


@dataclass(frozen=True, slots=True)
class ReportedPoint:
    """One configuration of a report, with its metrics or its failure."""

    label: str
    axes: dict[str, Any]
    at: datetime
    environment: dict[str, Any]
    metrics: tuple[MetricData, ...] = ()
    state: PointState = PointState.OK
    reason: str | None = None
    estimate_bytes: int | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportedRun:
    """One report; `notes` are its unmeasured statements (targets)."""

    run_id: str
    name: str
    kind: str
    source: str
    points: tuple[ReportedPoint, ...]
    notes: tuple[str, ...] = ()

    def begin(self) -> RunRecord:
        """The run's beginning, whose hash is that of all its records."""
        digest = hashlib.sha256()
        records = chain(chain.from_iterable(self.ended()), self.events())
        for place, record in enumerate(records):
            digest.update(("\n" * (place > 0) + record.model_dump_json()).encode())
        return RunRecord(
            run_id=self.run_id,
            at=self._first(),
            name=self.name,
            kind=self.kind,
            spec={"kind": self.kind, "source": self.source, "notes": list(self.notes)},
            spec_hash=digest.hexdigest()[:16],
            origin=Origin.REPORTED,
            source=self.source,
        )

    def ended(self) -> Iterator[tuple[PointRecord, OutcomeRecord]]:
        """The records of each point, deterministic for a given table; made anew by each call, as they are many."""
        return (_point_records(self.run_id, number, point) for number, point in enumerate(self.points))

    def events(self) -> Iterator[EventRecord]:
        first = self._first()
        return (EventRecord(run_id=self.run_id, at=first, message=note) for note in self.notes)

    def end(self) -> RunEndRecord:
        last = max((point.at for point in self.points), default=self._first())
        return RunEndRecord(run_id=self.run_id, at=last, state=RunState.DONE)

    def _first(self) -> datetime:
        return min((point.at for point in self.points), default=datetime(2000, 1, 1, tzinfo=UTC))


def _point_records(run_id: str, number: int, point: ReportedPoint) -> tuple[PointRecord, OutcomeRecord]:
    point_id = f"{run_id}/{number}"
    planned = PointRecord(
        run_id=run_id,
        at=point.at,
        point_id=point_id,
        index=number,
        key=hashlib.sha256(f"{run_id}{point.label}{number}".encode()).hexdigest()[:16],
        label=point.label,
        config=point.config,
        axes=point.axes,
        estimate_bytes=point.estimate_bytes,
    )
    ended = OutcomeRecord(
        run_id=run_id,
        at=point.at,
        point_id=point_id,
        attempt=1,
        state=point.state,
        reason=point.reason,
        metrics=point.metrics,
        environment=point.environment,
    )
    return planned, ended


def number(row: Row, name: str) -> float | None:
    """The cell as a number; None if empty. Raises ReportedError."""
    text = (row.get(name) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ReportedError(f"{row['file']}: {name}: {shown(text)} is no number; correct the cell")
    return value


def integer(row: Row, name: str) -> int | None:
    """The cell as an integer; None if empty. Raises ReportedError."""
    value = number(row, name)
    if value is None:
        return None
    if value != int(value) or abs(value) > _WHOLE:
        raise ReportedError(f"{row['file']}: {name}: {shown(row[name])} is no whole number; correct the cell")
    return int(value)


def day(row: Row, name: str = "date") -> datetime:
    """The cell's date and time in UTC; a bare date is midnight. Raises ReportedError."""
    try:
        moment = datetime.fromisoformat(row[name])
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ReportedError(f"{row['file']}: {name}: {shown(row[name])} is no date; write YYYY-MM-DD") from None


Reader = Callable[[list[Row]], Iterable[ReportedRun]]
