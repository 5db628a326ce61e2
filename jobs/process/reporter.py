"""Progress and live series inside a process: thinned, and sent by a thread where the work must not wait for a pipe."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jobs.process.messages import Beat, Note, RanksStarted, Warned
from jobs.schema.point import NOWHERE, SHORT, Reporter, Samples, Surroundings

BEAT_INTERVAL_S = 0.2  # within which further beats of one phase are not sent: writes stay out of timing loops
CHECKPOINT = "checkpoint"  # phase in which ranks write parts of unequal size: their beats cannot be compared by number


def interval(elapsed_s: float) -> float:
    """Seconds between two samples of a series: after 2,000, their number grows with the logarithm of time."""
    return max(1.0, elapsed_s / 2_000)


@dataclass
class BeatFilter:
    """Lets through the first beat of a phase, then one in `interval_s` seconds."""

    interval_s: float
    _last: tuple[str, float] = ("", -math.inf)  # phase and time of the one let through

    def passes(self, phase: str) -> bool:
        now = time.monotonic()
        last_phase, last_at = self._last
        if phase == last_phase and now - last_at < self.interval_s:
            return False
        self._last = (phase, now)
        return True


class ProcessReporter(Reporter):
    """The Reporter of a point's process, or of a rank.

    The work only leaves its present values in a dictionary, so that a full pipe or a slow parent never holds it up.

    Args:
        send: sends samples, in a thread while the work runs and by `close`; and all else, at once.
        units: unit by name of each series that may be sampled; None: any may, and the parent knows the units.
        rank: of this process, if it is one; its samples and texts are the rank's.
        interval: seconds between two samples of a series, from the seconds that it has been going on.
        longest: characters of a warning.
    """

    def __init__(
        self,
        send: Callable[[Beat | Samples | RanksStarted | Warned | Note], None],
        surroundings: Surroundings = NOWHERE,
        *,
        units: Mapping[str, str] | None = None,
        rank: int | None = None,
        interval: Callable[[float], float] = interval,
        longest: int = 1000,
    ) -> None:
        self.surroundings = surroundings
        self.last_beat = time.monotonic()
        self._send = send
        self._units = units
        self._rank = rank
        self._interval = interval
        self._longest = longest
        self._filter = BeatFilter(BEAT_INTERVAL_S)
        self._beats = 0
        self._latest: dict[tuple[int, str], tuple[int, float, float]] = {}  # rank and series -> step, time, value
        self._lock = threading.Lock()
        self._at = 0.0  # time of the latest sample
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._names: Counter[str] = Counter()  # of notes

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.last_beat = time.monotonic()
        self._beats += phase != CHECKPOINT
        if self._filter.passes(phase):
            self._send(Beat(phase, int(done or 0), int(total or 0), self._rank or 0, self._beats))

    def sample(self, step: int, values: Mapping[str, float], rank: int = 0) -> None:
        rank = rank if self._rank is None else self._rank
        if self._units is not None and (unknown := [name for name in values if name not in self._units]):
            raise ValueError(f"series {unknown[0]}: is not declared by this name; mend the kind's QUANTITIES")
        if step < 0 or rank < 0:
            raise ValueError(f"series at step {step} of rank {rank}: must both be 0 or more")
        with self._lock:
            at = self._at = max(self._at, time.time())  # of two samples of a step the later one counts
            for name, value in values.items():
                if math.isfinite(value):
                    self._latest[rank, name] = (int(step), at, float(value))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
            self._thread.start()

    def warn(self, text: str) -> None:
        line = " ".join(text.split())[: self._longest]
        self._send(Warned(line.encode(errors="backslashreplace").decode(), self._rank or 0))  # no lone surrogates

    def keep(self, name: str, text: str) -> None:
        assert self._rank is None or len(text) <= SHORT, "it would not fit into one write"
        self._names[name] += self._rank is None  # the point's own process numbers its ranks' notes
        if (count := self._names[name]) > 1:
            stem, dot, ending = name.rpartition(".")
            name = f"{stem}-{count}{dot}{ending}" if dot else f"{name}-{count}"
        self._send(Note(name, text, self._rank or 0))

    def ranks(self, pids: Sequence[int]) -> None:
        self._send(RanksStarted(tuple(pids)))

    def close(self) -> None:
        """Send the last sample of each series, and end the thread."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join()

    def _run(self) -> None:
        begun, closed = time.monotonic(), False
        while not closed:
            closed = self._closed.is_set()  # what is sampled later is not sent
            with self._lock:
                latest, self._latest = self._latest, {}
            together: dict[tuple[int, int, float], dict[str, float]] = {}
            for (rank, name), (step, at, value) in latest.items():
                together.setdefault((rank, step, at), {})[name] = value
            for (rank, step, at), values in sorted(together.items(), key=lambda item: item[0]):
                units = {} if self._units is None else {name: self._units[name] for name in values}
                self._send(Samples(rank, step, at, values, units))
            self._closed.wait(self._interval(time.monotonic() - begun))
