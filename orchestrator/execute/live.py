"""The present of a running point, as its supervisor passes it on: pieces of series, and the pace of a phase."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.hardware.telemetry import ProcessUsage, Telemetry
from jobs.process.reporter import CHECKPOINT, interval
from jobs.schema.point import Samples
from orchestrator.store.records import SeriesRecord

LEAST_PIECE_S = 2.0
_MOST_PIECES = 1000  # of a series before its pieces begin to grow, so that the journal grows no faster than the samples
_PACE_WINDOW_S = 60.0
_PACE_STEP_S = 1.0


class LiveSeries:
    """Collects the samples of one attempt, its own and the telemetry's, into pieces of two seconds or more.

    `ids` are the fields of the attempt's records. The readings of `meter` are thinned as the measurement's samples are.
    """

    def __init__(self, ids: Mapping[str, Any], meter: Telemetry | ProcessUsage) -> None:
        self._ids, self._meter = ids, meter
        # By rank, name and unit: step, time and value.
        self._samples: dict[tuple[int, str, str], list[tuple[int, float, float]]] = defaultdict(list)
        self._begun = self._passed_on = self._read = time.monotonic()

    def take(self, samples: Samples) -> None:
        """Add samples of the measurement, or of the meter."""
        for name, value in samples.values.items():
            self._samples[samples.rank, name, samples.units[name]].append((samples.step, samples.at, value))

    def follow(self, pids: Sequence[int]) -> None:
        """Read the usage of each of these processes, by rank, where the meter reads processes."""
        if isinstance(self._meter, ProcessUsage):
            self._read_meter()
            self._meter.follow(pids)

    def due(self, *, ended: bool = False) -> tuple[SeriesRecord, ...]:
        """The samples since the last piece, once that is long enough ago or the attempt has `ended`."""
        clock = time.monotonic()
        if ended or clock - self._read >= interval(clock - self._begun):
            self._read = clock
            self._read_meter()
        if not ended and clock - self._passed_on < max(LEAST_PIECE_S, (clock - self._begun) / _MOST_PIECES):
            return ()
        self._passed_on = clock
        records = []
        for (rank, name, unit), samples in self._samples.items():
            steps, times, values = zip(*samples, strict=True)
            series = {"rank": rank, "name": name, "unit": unit, "steps": steps, "values": values}
            series["times"] = tuple(round(at, 3) for at in times)
            records.append(SeriesRecord(**self._ids, **series))
        self._samples.clear()
        return tuple(records)

    def _read_meter(self) -> None:
        for reading in self._meter.readings():
            self.take(reading)


@dataclass
class Pace:
    """Progress of a point, and its steps per wall-clock second over the last minute, interruptions included.

    A checkpoint reports the progress of the longest phase that it interrupts.
    """

    _phases: dict[str, tuple[int, int]] = field(default_factory=dict)  # steps done, and in all
    _seen: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)  # time and steps done then, about sixty

    def note(self, phase: str, done: int, total: int) -> tuple[int, int, float | None]:
        """Note that a phase has got to `done` of `total` steps, 0 where that is unknown.

        Returns steps done and in all, and steps a second; None where that is unknown.
        """
        clock = time.monotonic()
        interrupted = [name for name, (steps, all_) in self._phases.items() if steps + 1 < all_]
        if interrupted and phase == CHECKPOINT:
            phase = max(interrupted, key=lambda name: self._phases[name][1])
            done, total = self._phases[phase]
        elif phase not in self._phases or done < self._phases[phase][0]:  # it begins, or anew
            self._seen[phase] = deque()
        self._phases[phase] = done, total
        seen = self._seen[phase]
        if not seen or clock - seen[-1][0] >= _PACE_STEP_S:
            seen.append((clock, done))
        while len(seen) > 2 and clock - seen[0][0] > _PACE_WINDOW_S:
            seen.popleft()
        seconds, steps = clock - seen[0][0], done - seen[0][1]
        return done, total, steps / seconds if steps and seconds >= _PACE_STEP_S else None
