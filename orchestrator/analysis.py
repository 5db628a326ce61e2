"""Scaling fits: how a quantity grows with the sequence length, as the slope of a line on log-log axes.

The model is value = c · S^p. Least squares on log10 gives p and c; the interval of p is Student's t with n-2 degrees of
freedom. Values are per sequence (time and memory divided by the batch), so that sweeps at a fixed number of tokens
compare with sweeps at batch 1. A series has one run, one implementation, one shape: measured and reported figures, two
machines or two configurations never meet in one fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

MIN_LENGTHS = 3
SERIES = (
    "run_id",
    "run_name",
    "origin",
    "source",
    "implementation",
    "workload",
    "pass",
    "query_heads",
    "kv_heads",
    "head_dim",
    "layers",
    "dtype",
    "device",
    "gpu",
    "metric",
    "unit",
)
_WHOLE = ("query_heads", "kv_heads", "head_dim", "layers")


@dataclass(frozen=True)
class PowerLaw:
    """value = 10**coefficient · S**exponent.

    Attributes:
        exponent: the slope on log-log axes: 1 is linear, 2 quadratic.
        ci_low, ci_high: its confidence interval.
        coefficient: log10 of the value at S = 1.
        n: points fitted.
        r2: share of the variance of log10(value) that the line explains.
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
        """The fitted value at a length."""
        return 10 ** (self.coefficient + self.exponent * math.log10(seq_len))


@dataclass(frozen=True)
class Fit(PowerLaw):
    """The power law of one series: one run × implementation × workload × pass × shape × dtype × device × metric."""

    run_id: str
    run_name: str
    origin: str
    source: str | None
    implementation: str | None
    workload: str | None
    pass_: str | None
    query_heads: int | None
    kv_heads: int | None
    head_dim: int | None
    layers: int | None
    dtype: str | None
    device: str | None
    gpu: str | None
    metric: str
    unit: str
    point_ids: tuple[str, ...]


def fit_power_law(lengths: Sequence[float], values: Sequence[float], confidence: float = 0.95) -> PowerLaw | None:
    """Fit value = c · S^p; None with fewer than three distinct lengths, which show no slope that could be wrong.

    Raises:
        ValueError: a length or value is not positive and finite (a failure is a state, not a zero).
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
    if np.ptp(y) == 0:  # a constant: nothing is left to explain, and scipy gives NaN
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
    """A fit for each series of `rows` (columns of the view v_scaling) that has three distinct lengths.

    Throughput is left out: it is the inverse of time. Zero values (nothing allocated beyond the inputs) have no
    logarithm; a series that holds one has no power law.
    """
    fitted = rows.loc[(rows["metric"] != "throughput") & rows["seq_len"].notna()]
    fits = []
    for identity, group in fitted.groupby(list(SERIES), dropna=False, sort=True):
        if group["per_sequence"].min() <= 0:
            continue
        law = fit_power_law(group["seq_len"].tolist(), group["per_sequence"].tolist())
        if law is not None:
            fits.append(Fit(**asdict(law), **_identity(identity), point_ids=tuple(group["point_id"])))
    return fits


def fits_frame(fits: Sequence[Fit]) -> pd.DataFrame:
    """Fits as a frame, a row a fit: the series' columns, then the attributes of its power law and its points."""
    numbers = ("exponent", "ci_low", "ci_high", "n", "r2", "coefficient", "lengths", "point_ids")
    names = {name: "pass_" if name == "pass" else name for name in SERIES} | {name: name for name in numbers}
    return pd.DataFrame(
        [{name: getattr(fit, attribute) for name, attribute in names.items()} for fit in fits], columns=list(names)
    )


def local_slopes(lengths: Sequence[float], values: Sequence[float]) -> list[tuple[int, float]]:
    """The slope between neighbouring lengths, as (the longer one, slope): where a curve bends that one fit hides.

    Several values at a length count with their geometric mean. Two lengths a factor 2 apart whose values have the ratio
    r give log2(r).
    """
    logs: dict[int, list[float]] = defaultdict(list)
    for length, value in zip(lengths, values, strict=True):
        logs[int(length)].append(math.log2(value))
    means = [(length, fmean(logs[length])) for length in sorted(logs)]
    return [(b, (high - low) / math.log2(b / a)) for (a, low), (b, high) in pairwise(means)]


def _identity(values: Any) -> dict[str, Any]:
    identity: dict[str, Any] = {
        name: None if pd.isna(value) else value for name, value in zip(SERIES, values, strict=True)
    }
    identity |= {name: None if identity[name] is None else int(identity[name]) for name in _WHOLE}
    identity["pass_"] = identity.pop("pass")
    return identity
