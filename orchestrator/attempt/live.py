"""The present of a running point, as its supervisor passes it on: pieces of series, and the pace of a phase."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.measure.process_usage import ProcessUsage
from jobs.measure.telemetry import Telemetry
from jobs.point import Reading
from orchestrator.attempt import protocol
from orchestrator.attempt.sampling import interval
from orchestrator.messages import Assignment, Series
from orchestrator.records import SeriesRecord

LEAST_PIECE_S = 2.0
_MOST_PIECES = 1000  # of a series before its pieces begin to grow, so that the journal grows no faster than the samples
_PACE_WINDOW_S = 60.0
_PACE_STEP_S = 1.0


@dataclass
class _Piece:
    """Samples of one series that were not passed on yet."""

    unit: str
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class LiveSeries:
    """Collects the samples of one attempt, its own and the telemetry's, into pieces of two seconds or more.

    Args:
        meter: the telemetry to read along; its readings are thinned as the measurement's samples are.
    """

    def __init__(self, assignment: Assignment, meter: Telemetry | ProcessUsage) -> None:
        self._assignment = assignment
        self._meter = meter
        self._pieces: dict[tuple[int, str], _Piece] = {}
        self._begun = self._passed_on = self._read = time.monotonic()

    def take(self, samples: protocol.Samples) -> None:
        """Take in samples of the measurement."""
        for name, value in samples.values.items():
            self._add(samples.rank, name, samples.units[name], samples.step, samples.at, value)

    def due(self) -> Series | None:
        """The samples since the last piece, once that is long enough ago; None until then, or without samples."""
        clock = time.monotonic()
        if clock - self._read >= interval(clock - self._begun):
            self._read = clock
            self._note(self._meter.readings())
        if clock - self._passed_on < max(LEAST_PIECE_S, (clock - self._begun) / _MOST_PIECES):
            return None
        self._passed_on = clock
        return self._pass_on()

    def rest(self) -> Series | None:
        """The last samples, of the attempt's end."""
        self._note(self._meter.readings())
        return self._pass_on()

    def _note(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            for quantity, value in reading.values.items():
                self._add(reading.rank, quantity.name, quantity.unit, reading.number, reading.at, value)

    def _add(self, rank: int, name: str, unit: str, step: int, at: float, value: float) -> None:
        piece = self._pieces.setdefault((rank, name), _Piece(unit))
        piece.steps.append(step)
        piece.times.append(round(at, 3))
        piece.values.append(value)

    def _pass_on(self) -> Series | None:
        pieces, self._pieces = self._pieces, {}
        asked = self._assignment
        records = tuple(
            SeriesRecord(
                run_id=asked.run_id,
                point_id=asked.point_id,
                attempt=asked.attempt,
                rank=rank,
                name=name,
                unit=piece.unit,
                steps=tuple(piece.steps),
                times=tuple(piece.times),
                values=tuple(piece.values),
            )
            for (rank, name), piece in pieces.items()
        )
        return Series(records) if records else None


class Pace:
    """Steps a second of a phase, over the last minute of it."""

    def __init__(self) -> None:
        self._phase = ""
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, phase: str, done: int) -> float | None:
        """Note that a phase has got to `done`. Returns its steps a second; None where it is unknown."""
        clock = time.monotonic()
        if phase != self._phase or (self._seen and done < self._seen[-1][1]):
            self._phase, self._seen = phase, deque()
        if not self._seen or clock - self._seen[-1][0] >= _PACE_STEP_S:
            self._seen.append((clock, done))
        while len(self._seen) > 2 and clock - self._seen[0][0] > _PACE_WINDOW_S:
            self._seen.popleft()
        begun, first = self._seen[0]
        seconds, steps = clock - begun, done - first
        return steps / seconds if steps and seconds >= _PACE_STEP_S else None
