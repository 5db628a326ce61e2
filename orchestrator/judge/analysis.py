"""Scaling fits: growth of each stored series with the sequence length (orchestrator.judge.growth).

Values are per sequence (time and memory divided by the batch), so that sweeps at a fixed number of tokens compare with
sweeps at batch 1. A series has one run, one implementation and one shape: a fit never mixes measured and reported
figures, machines or configurations.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from jobs.schema.axes import AXES, more_columns
from jobs.schema.quantities import Plot
from orchestrator.judge.growth import NORMAL_INTERVAL, Growth, LocalSlope, fit_growth, local_slopes

NSA = "NSA (Triton)"
_CURVE_POINTS = 61
_BACKEND = re.compile(r"^nsa$|(?<![\w-])triton(?![\w-]| *\d)")  # not the package, with its version


def named(words: str) -> str:
    """The name of an implementation, or a point's label, as people read it: the project's own is NSA (Triton)."""
    return _BACKEND.sub(NSA, words)


def series_columns(columns: Iterable[str]) -> list[str]:
    """Columns that identify a series: rows with equal values in all of them are on one curve."""
    axes = [axis.name for axis in AXES if axis.in_series]
    return ["run_id", "run_name", "origin", "source", *axes, *more_columns(columns), "gpu", "metric", "unit"]


@dataclass(frozen=True, kw_only=True)
class Fit(Growth):
    """The growth of one series."""

    local: tuple[LocalSlope, ...]  # the slopes of all of the series' octaves, shortest first
    series: Mapping[str, Any]  # the series' values of `series_columns`; None for a missing one
    metric: str
    run_id: str
    point_ids: tuple[str, ...]  # of the points fitted


def surroundings(row: Mapping[str, Any]) -> list[str]:
    """Environment variables and interpreter of a row or a fit's series; those that it has."""
    return [value for name in ("env", "python") if isinstance(value := row.get(name), str)]


def scaling_fits(rows: pd.DataFrame) -> list[Fit]:
    """Fits of all series in `rows` (of the view v_scaling or v_metrics) with at least three distinct lengths.

    With v_scaling, only growing quantities are fitted: a rate is the inverse of a time. Zero values (nothing allocated
    beyond the inputs) and lengths have no logarithm; a series that holds one is not fitted.
    """
    fitted = rows.loc[rows["seq_len"].notna()]
    if "plot" in rows:
        fitted = fitted.loc[fitted["plot"] == Plot.GROWTH]
    # Relative standard errors, from the intervals of the samples; NaN where there is none.
    low, high, middle = (fitted[name].to_numpy(dtype=float, na_value=np.nan) for name in ("ci_low", "ci_high", "value"))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a value of 0, whose series is not fitted
        spreads = (high - low) / 2 / NORMAL_INTERVAL / middle
    fitted = fitted.assign(spread=np.where(spreads >= 0, spreads, np.nan))
    columns = series_columns(rows.columns)
    fits = []
    for identity, group in fitted.groupby(columns, dropna=False, sort=True):
        lengths, values = tuple(group["seq_len"]), tuple(group["per_sequence"])
        if not all(number > 0 for number in (*lengths, *values)):
            continue
        # Where a spread is unknown, the widest of the series: a value of one sample weighs no more than others.
        spread = group["spread"].fillna(group["spread"].max()).fillna(0.0)
        law, local = _laws(lengths, values, tuple(spread.tolist()))
        if law is not None:
            series, points = series_of(columns, identity), group.loc[group["seq_len"] >= law.lengths[0], "point_id"]
            about = {"metric": series["metric"], "run_id": series["run_id"], "point_ids": tuple(points)}
            fits.append(Fit(**vars(law), local=local, series=series, **about))
    return fits


@lru_cache(maxsize=5000)  # pages, gates and reports ask for the same fits every few seconds
def _laws(
    lengths: tuple[float, ...], values: tuple[float, ...], spreads: tuple[float, ...]
) -> tuple[Growth | None, tuple[LocalSlope, ...]]:
    return fit_growth(lengths, values, spreads), local_slopes(lengths, values, spreads)


def series_of(columns: Sequence[str], values: Any) -> dict[str, Any]:
    """Series by the values of its columns; None for a missing one."""
    whole = {axis.name for axis in AXES if axis.type == "whole"}
    series = {name: None if pd.isna(value) else value for name, value in zip(columns, values, strict=True)}
    return {name: int(value) if name in whole and value is not None else value for name, value in series.items()}


def fits_frame(fits: Sequence[Fit]) -> pd.DataFrame:
    """Frame with a row per fit: the series' columns, then its growth in numbers and in `law`, its `local` slopes and
    the fitted `curve`, pairs of length and value. Where a power law is refused, exponent and interval are NaN.
    """
    power, other = ("exponent", "ci_low", "ci_high"), ("overhead", "lengths", "local")
    rows = []
    for fit in fits:
        row = {**fit.series, **{name: math.nan if fit.refused else getattr(fit, name) for name in power}}
        # At equal distances on a logarithmic axis, on which an overhead bends a curve.
        curve = [(at, fit.at(at)) for at in np.geomspace(fit.lengths[0], fit.lengths[-1], _CURVE_POINTS).tolist()]
        rows.append(row | {name: getattr(fit, name) for name in other} | {"law": str(fit), "curve": curve})
    columns = series_columns({name for fit in fits for name in fit.series})
    return pd.DataFrame(rows, columns=[*columns, *power, *other, "law", "curve"])
