"""Messages of ranks to the process that started them: plain data, and how they are thinned."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jobs.schema.point import NOWHERE, SHORT, Surroundings

BEAT_INTERVAL_S = 0.2
"""Seconds within which further beats of one phase are not sent, only counted."""

SAMPLE_INTERVAL_S = 0.5
"""Seconds within which only the last sample of a series is kept."""

CHECKPOINT = "checkpoint"
"""Phase in which ranks write parts of unequal size, so that their beats cannot be compared by number."""

LONGEST_TEXT = 298
"""Characters of a text in a message: a launcher may send a message in one write to a pipe (PIPE_BUF)."""


@dataclass(frozen=True)
class RankBeat:
    """A rank got further. `number` counts the rank's beats but those of a checkpoint: ranks do the same, so the lowest
    is the slowest."""

    rank: int
    number: int
    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class RankSample:
    """Present values of a rank's live series (jobs.schema.point.Reporter)."""

    rank: int
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class RankStarting:
    """The rank's process runs and has yet to form a group with the others."""

    rank: int
    pid: int


@dataclass(frozen=True)
class RankStarted:
    """The rank's process runs, and so do all others'."""

    rank: int
    pid: int


@dataclass(frozen=True)
class RankEnded:
    """The rank has done its work; its process may end."""

    rank: int


@dataclass(frozen=True)
class RankFailure:
    """An exception ended a rank; `type` is its class."""

    rank: int
    type: str
    text: str


@dataclass(frozen=True)
class RankWarned:
    """A rank tells of something that does not end it."""

    rank: int
    text: str


@dataclass(frozen=True)
class RankNoted:
    """A short text of a rank, to be kept with the point at once as the file `name`."""

    rank: int
    name: str
    text: str


Message = RankBeat | RankSample | RankStarting | RankStarted | RankEnded | RankFailure | RankWarned | RankNoted


class RankReporter:
    """The Reporter (jobs.schema.point.Reporter) of a rank: posts messages to the process that started it."""

    def __init__(self, post: Callable[[Message], None], rank: int, surroundings: Surroundings = NOWHERE) -> None:
        self.surroundings = surroundings
        self._post = post
        self._rank = rank
        self._beats = 0
        self._last = ("", 0.0)  # phase and time of the last beat sent
        self._samples: dict[str, tuple[int, float]] = {}  # series -> step and value not sent yet
        self._sampled = -SAMPLE_INTERVAL_S
        self.last_beat = time.monotonic()
        post(RankStarted(rank, os.getpid()))

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report progress."""
        now = self.last_beat = time.monotonic()
        self._beats += phase != CHECKPOINT
        last_phase, last_at = self._last
        if phase != last_phase or now - last_at >= BEAT_INTERVAL_S:
            self._last = (phase, now)
            self._post(RankBeat(self._rank, self._beats, phase, done, total))

    def sample(self, step: int, values: Mapping[str, float], rank: int = 0) -> None:
        """Report present values of series of this rank."""
        self._samples |= {name: (step, value) for name, value in values.items()}
        if time.monotonic() - self._sampled >= SAMPLE_INTERVAL_S:
            self._send_samples()

    def warn(self, text: str) -> None:
        """Report something that does not end this rank."""
        self._post(RankWarned(self._rank, text[:LONGEST_TEXT]))

    def keep(self, name: str, text: str) -> None:
        """Have a short text kept with the point."""
        assert len(text) <= SHORT, "it would not fit into one write"
        self._post(RankNoted(self._rank, name, text))

    def ended(self) -> None:
        """Report that this rank has done its work."""
        self._send_samples()
        self._post(RankEnded(self._rank))

    def failed(self, err: BaseException) -> None:
        """Report the exception that ends this rank."""
        self._send_samples()
        self._post(failure(self._rank, err))

    def _send_samples(self) -> None:
        self._sampled = time.monotonic()
        samples, self._samples = self._samples, {}
        for step in sorted({step for step, _ in samples.values()}):
            values = {name: value for name, (at, value) in samples.items() if at == step}
            self._post(RankSample(self._rank, step, values))


def failure(rank: int, err: BaseException) -> RankFailure:
    """The message about the exception that ends a rank."""
    return RankFailure(rank, type(err).__name__, str(err).strip()[:LONGEST_TEXT])
