"""Scaling fits: growth of a quantity with the sequence length, as the slope of a line on log-log axes.

The model is value = c · S^p. Least squares on log10 gives p and c; the interval of p is Student's t with n-2 degrees of
freedom. Values are per sequence (time and memory divided by the batch), so that sweeps at a fixed number of tokens
compare with sweeps at batch 1. A series has one run, one implementation and one shape: a fit never mixes measured and
reported figures, machines or configurations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from jobs.axes import AXES, MORE, more_columns
from jobs.quantities import Plot

MIN_LENGTHS = 3
_RUN = ("run_id", "run_name", "origin", "source")
_MEASURED = ("gpu", "metric", "unit")


def series_columns(columns: Iterable[str]) -> list[str]:
    """Columns that identify a series: rows with equal values in all of them are on one curve."""
    axes = [axis.name for axis in AXES if axis.in_series]
    return [*_RUN, *axes, *more_columns(columns), *_MEASURED]


@dataclass(frozen=True)
class PowerLaw:
    """value = 10**coefficient · S**exponent.

    Attributes:
        exponent: the slope on log-log axes: 1 is linear, 2 quadratic.
        ci_low, ci_high: its confidence interval.
        coefficient: log10 of the value at S = 1.
        n: points fitted.
        r2: share of the variance of log10(value) explained by the line.
        lengths: the distinct lengths fitted, ascending.
    """

    exponent: float
    ci_low: float
    ci_high: float
    coefficient: float
    n: int
    r2: float
    lengths: tuple[int, ...]

    def at(self, seq_len: float) -> float:
        """Fitted value at a length."""
        return 10 ** (self.coefficient + self.exponent * math.log10(seq_len))


@dataclass(frozen=True)
class Fit(PowerLaw):
    """The power law of one series.

    Attributes:
        series: the series' values of `series_columns`; None for a missing one.
        point_ids: ids of the points fitted.
    """

    series: Mapping[str, Any]
    point_ids: tuple[str, ...]

    @property
    def metric(self) -> str:
        return self.series["metric"]

    @property
    def run_id(self) -> str:
        return self.series["run_id"]


def fit_power_law(lengths: Sequence[float], values: Sequence[float], confidence: float = 0.95) -> PowerLaw | None:
    """Fit value = c · S^p; None with fewer than three distinct lengths, which cannot contradict a line.

    Raises:
        ValueError: the numbers of lengths and values differ, or one of them is not positive and finite (a failure is a
            state, not a zero).
    """
    x, y = np.asarray(lengths, dtype=float), np.asarray(values, dtype=float)
    if len(x) != len(y):
        raise ValueError(f"lengths and values differ in number: {len(x)} and {len(y)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        raise ValueError("lengths and values must be positive and finite; leave out what was not measured")
    distinct = tuple(sorted({int(length) for length in x}))
    if len(distinct) < MIN_LENGTHS:
        return None
    line: Any = stats.linregress(np.log10(x), np.log10(y))
    if np.ptp(y) == 0:  # constant values have no variance, and scipy gives NaN
        return PowerLaw(0.0, 0.0, 0.0, float(np.log10(y[0])), len(x), 1.0, distinct)
    half = float(stats.t.ppf((1 + confidence) / 2, len(x) - 2) * line.stderr)
    slope = float(line.slope)
    return PowerLaw(
        exponent=slope,
        ci_low=slope - half,
        ci_high=slope + half,
        coefficient=float(line.intercept),
        n=len(x),
        r2=float(line.rvalue) ** 2,
        lengths=distinct,
    )


def scaling_fits(rows: pd.DataFrame) -> list[Fit]:
    """Fits of all series in `rows` (of the view v_scaling or v_metrics) with at least three distinct lengths.

    With v_scaling, only growing quantities are fitted: a rate is the inverse of a time. Zero values (nothing allocated
    beyond the inputs) have no logarithm; a series that holds one is not fitted.
    """
    fitted = rows.loc[rows["seq_len"].notna()]
    if "plot" in rows:
        fitted = fitted.loc[fitted["plot"] == Plot.GROWTH]
    columns = series_columns(rows.columns)
    fits = []
    for identity, group in fitted.groupby(columns, dropna=False, sort=True):
        if group["per_sequence"].min() <= 0:
            continue
        law = fit_power_law(group["seq_len"].tolist(), group["per_sequence"].tolist())
        if law is not None:
            fits.append(Fit(**asdict(law), series=_series(columns, identity), point_ids=tuple(group["point_id"])))
    return fits


def fits_frame(fits: Sequence[Fit]) -> pd.DataFrame:
    """Frame with a row per fit: the series' columns, then the attributes of its power law and its points."""
    numbers = ("exponent", "ci_low", "ci_high", "n", "r2", "coefficient", "lengths", "point_ids")
    columns = series_columns({name for fit in fits for name in fit.series})
    rows = [{**fit.series, **{name: getattr(fit, name) for name in numbers}} for fit in fits]
    return pd.DataFrame(rows, columns=[*columns, *numbers])


def local_slopes(lengths: Sequence[float], values: Sequence[float]) -> list[tuple[int, float]]:
    """Slopes between neighbouring lengths, as (longer length, slope); they show bends that a single fit hides.

    Several values at one length are replaced by their geometric mean. Two lengths a factor 2 apart with values of ratio
    r give log2(r).
    """
    logs: dict[int, list[float]] = defaultdict(list)
    for length, value in zip(lengths, values, strict=True):
        logs[int(length)].append(math.log2(value))
    means = [(length, fmean(logs[length])) for length in sorted(logs)]
    return [(b, (high - low) / math.log2(b / a)) for (a, low), (b, high) in pairwise(means)]


def _series(columns: Sequence[str], values: Any) -> dict[str, Any]:
    whole = {axis.name for axis in AXES if axis.type == "whole"}
    series = {name: None if pd.isna(value) else value for name, value in zip(columns, values, strict=True)}
    return {
        name: int(value) if value is not None and (name in whole or _is_whole(name, value)) else value
        for name, value in series.items()
    }


def _is_whole(name: str, value: Any) -> bool:
    """Whether the value is a kind-specific axis' whole number that pandas turned into a float."""
    return name.startswith(MORE) and isinstance(value, float)
