"""Live series inside a point's process: samples are taken in by the measurement, thinned and sent by a thread.

The measurement only leaves its present values in a dictionary, so that a full pipe or a slow supervisor never holds it
up. Imported by the worker, once a point: standard library and plain data only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jobs.schema.point import NOWHERE, Beat, Surroundings
from jobs.schema.quantities import Quantities
from orchestrator.attempt.protocol import Noted, Ranks, Samples, Warned

LEAST_INTERVAL_S = 1.0
MOST_SAMPLES = 2000
"""Samples of a series before its interval begins to grow; after that their number grows with the logarithm of time."""

LONGEST_WARNING = 1000
"""Characters of a warning."""


def interval(elapsed_s: float) -> float:
    """Seconds between two samples of a series that has been going on for `elapsed_s` seconds."""
    return max(LEAST_INTERVAL_S, elapsed_s / MOST_SAMPLES)


@dataclass
class _Latest:
    """The latest sample of a series that was not sent."""

    step: int
    at: float
    value: float


class SamplingReporter:
    """The jobs.schema.point.Reporter of a worker.

    Args:
        beat: takes the progress.
        send: takes the samples, in a thread while the measurement runs and by `close`; and warnings, texts and ranks,
            at once.
        declared: the kind's quantities.
        surroundings: the point's.
    """

    def __init__(
        self,
        beat: Beat,
        send: Callable[[Samples | Ranks | Warned | Noted], None],
        declared: Quantities,
        surroundings: Surroundings = NOWHERE,
    ) -> None:
        self.surroundings = surroundings
        self._beat = beat
        self._send = send
        self._units = {quantity.name: quantity.unit for quantity in declared if not quantity.name.endswith("*")}
        self._latest: dict[tuple[int, str], _Latest] = {}
        self._lock = threading.Lock()
        self._begun = 0.0  # monotonic time of the first sample
        self._at = 0.0  # time of the latest sample
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._kept: Counter[str] = Counter()  # by the name that was asked for

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self._beat(phase, done, total)

    def sample(self, step: int, values: Mapping[str, float], rank: int = 0) -> None:
        """As jobs.schema.point.Reporter says."""
        if unknown := [name for name in values if name not in self._units]:
            raise ValueError(f"series {unknown[0]}: is not declared by this name; mend the kind's QUANTITIES")
        if step < 0 or rank < 0:
            raise ValueError(f"series at step {step} of rank {rank}: must both be 0 or more")
        with self._lock:
            at = self._at = max(self._at, time.time())  # of two samples of a step the later one counts
            for name, value in values.items():
                if math.isfinite(value):
                    self._latest[rank, name] = _Latest(int(step), at, float(value))
        if self._thread is None:
            self._begun = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()

    def warn(self, text: str) -> None:
        """As jobs.schema.point.Reporter says."""
        line = " ".join(text.split())[:LONGEST_WARNING]
        self._send(Warned(line.encode(errors="backslashreplace").decode()))  # a journal takes no lone surrogates

    def keep(self, name: str, text: str) -> None:
        """As jobs.schema.point.Reporter says."""
        self._kept[name] += 1
        if (count := self._kept[name]) > 1:
            stem, dot, ending = name.rpartition(".")
            name = f"{stem}-{count}{dot}{ending}" if dot else f"{name}-{count}"
        self._send(Noted(name, text))

    def ranks(self, pids: Sequence[int]) -> None:
        """As jobs.schema.point.Reporter says."""
        self._send(Ranks(tuple(pids)))

    def close(self) -> None:
        """End the thread, and send the last sample of each series."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
            self._send_latest()

    def _run(self) -> None:
        while True:
            self._send_latest()
            if self._closed.wait(interval(time.monotonic() - self._begun)):
                return

    def _send_latest(self) -> None:
        with self._lock:
            latest, self._latest = self._latest, {}
        together: dict[tuple[int, int, float], dict[str, float]] = {}
        for (rank, name), sample in latest.items():
            together.setdefault((rank, sample.step, sample.at), {})[name] = sample.value
        for (rank, step, at), values in together.items():
            self._send(Samples(rank, step, at, values, {name: self._units[name] for name in values}))
