"""Slopes of noisy readings that were taken in several pieces, each at a level of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEAST = 3  # readings beyond one for each piece, for the slope to have an error

INTERVAL = "95 % interval by Student's t, readings thinned by their lag-1 autocorrelation (Santer et al. 2000)"
"""The interval of a slope, in words."""


@dataclass(frozen=True)
class Slope:
    """A slope in units of y by units of x, with its 95 % interval; None where the readings are too alike in a row."""

    value: float
    low: float | None
    high: float | None


def common_slope(pieces: Sequence[int], x: Sequence[float], y: Sequence[float]) -> Slope | None:
    """Slope of y against x that all pieces share, whatever the level of each; None with too few readings.

    The within estimator of panel data: both are taken as deviations from their piece's means, which gives the slope of
    a least-squares fit with a dummy variable for each piece (Frisch and Waugh, Econometrica 1, 1933). Readings in a row
    are alike, so that the interval rests on n (1 - r) / (1 + r) of them, r being the lag-1 autocorrelation of the
    residuals (Santer et al., J. Geophys. Res. 105(D6), 7337, 2000).

    Args:
        pieces: the piece of each reading; readings of a piece follow each other.
    """
    numbers, levels = np.unique(np.asarray(pieces), return_inverse=True)
    xs, ys = (_deviations(np.asarray(values, dtype=np.float64), levels) for values in (x, y))
    spread = float(xs @ xs)
    if len(xs) < len(numbers) + _LEAST or spread == 0:
        return None
    value = float(xs @ ys) / spread
    residuals = ys - value * xs
    squares = float(residuals @ residuals)
    if squares <= 1e-24 * max(1.0, float(np.max(np.abs(y))) ** 2) * len(xs):  # exact but for rounding
        return Slope(value, value, value)
    followers = np.flatnonzero(levels[1:] == levels[:-1])
    likeness = max(0.0, float(residuals[followers] @ residuals[followers + 1]) / squares)
    freedom = len(xs) * (1 - likeness) / (1 + likeness) - len(numbers) - 1
    if freedom < 1:
        return Slope(value, None, None)
    from scipy import special  # takes long to import; scipy.stats four times as long

    reach = float(special.stdtrit(freedom, 0.975)) * math.sqrt(squares / freedom / spread)
    return Slope(value, value - reach, value + reach)


def _deviations(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Values less the mean of their piece."""
    return values - (np.bincount(levels, values) / np.bincount(levels))[levels]
