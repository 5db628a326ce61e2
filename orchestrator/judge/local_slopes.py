"""Local exponents of one series: its slope over each octave of the sequence length (law over all: growth.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.judge.growth import LEAST_NOISE, NORMAL_INTERVAL, checked, distinct_lengths, noise_of

_OCTAVE = 1.9  # from here on two lengths are an octave apart; half octaves are rounded to multiples of 128
_FEW_OCTAVES = 3  # beyond, a slope spans more than one
_SURE = 0.25  # half of a local slope's interval up to which it stands alone


@dataclass(frozen=True)
class LocalSlope:
    """Slope on log-log axes between two lengths, about an octave apart.

    Attributes:
        low, high: the shortest and the longest length that it rests on.
        exponent: the slope: 1 is linear, 2 quadratic.
        error: half of its 95 % interval, from the spread of the values.
    """

    low: int
    high: int
    exponent: float
    error: float

    def __str__(self) -> str:
        """The slope with the length at its end: "8K 1.5", "16K 1.2 ± 0.2", "2K to 16K 1.1" if it spans octaves."""
        start = f"{_short(self.low)} to " if self.high > _FEW_OCTAVES * self.low else ""
        slope = round(self.exponent, 1) + 0.0  # not -0.0
        return f"{start}{_short(self.high)} {slope:.1f}" + (f" ± {self.error:.1f}" if self.error > 0.1 else "")


def local_slopes(
    lengths: Sequence[float], values: Sequence[float], spreads: Sequence[float] | None = None
) -> tuple[LocalSlope, ...]:
    """Slopes of neighbouring octaves on log-log axes, shortest first; they show bends that a single fit hides.

    Octaves are counted from the longest length down; lengths within one share its slope, by least squares weighted
    with the spreads. An octave without a length at its lower end reaches to the next one that was measured, as does one
    whose slope is less certain than ±0.25. Several values at one length count as their geometric mean.

    Args:
        spreads: as in `orchestrator.judge.growth.fit_growth`; 0.1 % at least.

    Raises:
        ValueError: as in `fit_growth`.
    """
    x, y = checked(lengths, values)
    points = _means(x, y, noise_of(len(x), spreads, LEAST_NOISE))
    slopes: list[LocalSlope] = []
    high = len(points) - 1
    while high > 0:
        low = high - 1
        while low > 0 and (
            points[high].length < _OCTAVE * points[low].length or _slope(points[low : high + 1]).error > _SURE
        ):
            low -= 1
        slopes.append(_slope(points[low : high + 1]))
        high = low
    return tuple(reversed(slopes))


@dataclass(frozen=True)
class _Mean:
    """Geometric mean of the values at one length: log2 of it, and its standard error."""

    length: int
    log: float
    error: float


def _means(x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> list[_Mean]:
    """Means of the values at each length, shortest first."""
    logs = np.log2(y)
    places = [(length, np.flatnonzero(x.astype(int) == length)) for length in distinct_lengths(x)]
    return [
        _Mean(length, float(logs[at].mean()), float(np.sqrt((noise[at] ** 2).sum()) / len(at) / math.log(2)))
        for length, at in places
    ]


def _slope(points: Sequence[_Mean]) -> LocalSlope:
    """Weighted line through two points or more."""
    x = np.array([math.log2(point.length) for point in points])
    y, weights = np.array([point.log for point in points]), np.array([point.error for point in points]) ** -2.0
    away = x - np.average(x, weights=weights)
    squares = float(weights @ away**2)
    error = NORMAL_INTERVAL / math.sqrt(squares)
    return LocalSlope(points[0].length, points[-1].length, float(weights * away @ y) / squares, error)


def _short(length: int) -> str:
    """A length in three digits: 512, 4K, 90.5K, 1M."""
    for size, suffix in ((2**20, "M"), (2**10, "K")):
        if length >= size:
            return f"{length / size:.3g}{suffix}"
    return str(length)
