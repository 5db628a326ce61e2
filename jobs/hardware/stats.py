"""Statistics of samples: median and percentiles, the slope of readings; each with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from jobs.schema.point import Metric
from jobs.schema.quantities import FEWEST_SAMPLES, Quantity

_RESAMPLES = 2000
_LEAST = 3  # readings beyond one for each piece, for a slope to have an error

SLOPE_INTERVAL = "95 % interval by Student's t, readings thinned by their lag-1 autocorrelation (Santer et al. 2000)"
"""The interval of a slope, in words."""


def summarize(quantity: Quantity, samples: Sequence[float], method: str = "") -> Metric:
    """Metric of a quantity: the median of `samples`, with p10, p90 and a 95 % bootstrap interval of the median.

    The bootstrap is seeded: the same samples give the same interval. Of fewer than six samples there is none: it would
    be their range. Raises ValueError without a sample.
    """
    if not samples:
        raise ValueError(f"{quantity.name}: no sample was taken")
    values = np.asarray(samples, dtype=np.float64)
    low = high = None
    if len(values) >= FEWEST_SAMPLES:
        draws = np.random.default_rng(0).choice(values, size=(_RESAMPLES, len(values)))
        low, high = (float(x) for x in np.percentile(np.median(draws, axis=1), [2.5, 97.5]))
    p10, p90 = (float(x) for x in np.percentile(values, [10, 90]))
    return Metric(
        name=quantity.name,
        unit=quantity.unit,
        value=float(np.median(values)),
        samples=tuple(float(x) for x in values),
        p10=p10,
        p90=p90,
        ci_low=low,
        ci_high=high,
        method=method,
    )


@dataclass(frozen=True)
class Slope:
    """A slope in units of y by units of x, with its 95 % interval; None where the readings are too alike in a row."""

    value: float
    low: float | None
    high: float | None


def common_slope(pieces: ArrayLike, x: ArrayLike, y: ArrayLike) -> Slope | None:
    """Slope of y against x that all pieces share, whatever the level of each; None with too few readings.

    The within estimator of panel data: both are taken as deviations from their piece's means, which gives the slope of
    a least-squares fit with a dummy variable for each piece (Frisch and Waugh, Econometrica 1, 1933). Readings in a row
    are alike, so that the interval rests on n (1 - r) / (1 + r) of them, r being the lag-1 autocorrelation of the
    residuals (Santer et al., J. Geophys. Res. 105(D6), 7337, 2000). Readings of a piece follow each other.
    """
    numbers, levels = np.unique(np.asarray(pieces), return_inverse=True)
    deviations = []  # from the mean of their piece
    for values in (np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)):
        deviations.append(values - (np.bincount(levels, values) / np.bincount(levels))[levels])
    xs, ys = deviations
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
