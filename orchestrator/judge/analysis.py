"""Scaling fits: growth of each stored series with the sequence length (orchestrator.judge.growth).

Values are per sequence (time and memory divided by the batch), so that sweeps at a fixed number of tokens compare with
sweeps at batch 1. A series has one run, one implementation and one shape: a fit never mixes measured and reported
figures, machines or configurations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from jobs.schema.axes import AXES, more_columns
from jobs.schema.quantities import Plot
from orchestrator.judge.growth import (
    NORMAL_INTERVAL,
    Growth,
    LocalSlope,
    PowerLaw,
    fit_growth,
    fit_power_law,
    local_slopes,
)

_RUN = ("run_id", "run_name", "origin", "source")
_MEASURED = ("gpu", "metric", "unit")


def series_columns(columns: Iterable[str]) -> list[str]:
    """Columns that identify a series: rows with equal values in all of them are on one curve."""
    axes = [axis.name for axis in AXES if axis.in_series]
    return [*_RUN, *axes, *more_columns(columns), *_MEASURED]


@dataclass(frozen=True)
class Fit(Growth):
    """The growth of one series.

    Attributes:
        plain: the power law through all of the series' lengths.
        local: the slopes of all of the series' octaves, shortest first.
        series: the series' values of `series_columns`; None for a missing one.
        point_ids: ids of the points fitted.
    """

    plain: PowerLaw
    local: tuple[LocalSlope, ...]
    series: Mapping[str, Any]
    point_ids: tuple[str, ...]

    @property
    def metric(self) -> str:
        return self.series["metric"]

    @property
    def run_id(self) -> str:
        return self.series["run_id"]

    @property
    def local_text(self) -> str:
        """The local exponents in short: "4K 1.2, 8K 1.5"."""
        return ", ".join(map(str, self.local))


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
    fitted = fitted.assign(spread=_spreads(fitted))
    columns = series_columns(rows.columns)
    fits = []
    for identity, group in fitted.groupby(columns, dropna=False, sort=True):
        lengths, values = tuple(group["seq_len"]), tuple(group["per_sequence"])
        if not all(number > 0 for number in (*lengths, *values)):
            continue
        law, plain, local = _laws(lengths, values, tuple(group["spread"]))
        if law is not None and plain is not None:
            points = tuple(group.loc[group["seq_len"] >= law.lengths[0], "point_id"])
            series = series_of(columns, identity)
            fits.append(Fit(**asdict(law), plain=plain, local=local, series=series, point_ids=points))
    return fits


def fits_frame(fits: Sequence[Fit]) -> pd.DataFrame:
    """Frame with a row per fit: the series' columns, then its growth, points, `plain_exponent` and `local_text`."""
    growth = ("exponent", "ci_low", "ci_high", "coefficient", "overhead", "residual", "n", "lengths")
    law = (*growth, "point_ids", "local_text")
    columns = series_columns({name for fit in fits for name in fit.series})
    rows = [
        {**fit.series, **{name: getattr(fit, name) for name in law}, "plain_exponent": fit.plain.exponent}
        for fit in fits
    ]
    return pd.DataFrame(rows, columns=[*columns, *law, "plain_exponent"])


@lru_cache(maxsize=5000)  # pages, gates and reports ask for the same fits every few seconds
def _laws(
    lengths: tuple[float, ...], values: tuple[float, ...], spreads: tuple[float, ...]
) -> tuple[Growth | None, PowerLaw | None, tuple[LocalSlope, ...]]:
    return (
        fit_growth(lengths, values, spreads),
        fit_power_law(lengths, values),
        local_slopes(lengths, values, spreads),
    )


def _spreads(rows: pd.DataFrame) -> np.ndarray:
    """Relative standard errors of values, from the intervals of their samples; 0 where there is none."""
    low, high, value = (rows[name].to_numpy(dtype=float, na_value=np.nan) for name in ("ci_low", "ci_high", "value"))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # a value of 0, whose series is not fitted
        return np.fmax((high - low) / 2 / NORMAL_INTERVAL / value, 0.0)


def series_of(columns: Sequence[str], values: Any) -> dict[str, Any]:
    """Series by the values of its columns; None for a missing one."""
    whole = {axis.name for axis in AXES if axis.type == "whole"}
    series = {name: None if pd.isna(value) else value for name, value in zip(columns, values, strict=True)}
    return {name: int(value) if name in whole and value is not None else value for name, value in series.items()}
