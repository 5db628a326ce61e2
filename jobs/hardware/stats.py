"""Statistics of samples: median, percentiles, bootstrap interval. Every sample is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobs.schema.point import Metric
from jobs.schema.quantities import Quantity

_RESAMPLES = 2000


def summarize(quantity: Quantity, samples: Sequence[float], method: str = "") -> Metric:
    """Metric of a quantity: the median of `samples`, with p10, p90 and a 95 % bootstrap interval of the median.

    The bootstrap is seeded: the same samples give the same interval. With fewer than three samples no interval
    is given.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError(f"{quantity.name}: no sample was taken")
    values = np.asarray(samples, dtype=np.float64)
    low = high = None
    if len(values) >= 3:
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
