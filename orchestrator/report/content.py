"""Facts of a report, gathered from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobs.schema.axes import AXES, more_columns
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import AGAINST_LENGTH, Plot, Quantities, Role
from jobs.schema.states import Origin
from orchestrator.judge.analysis import Fit, scaling_fits
from orchestrator.judge.verdicts import TargetVerdict, evaluate, load_gates
from orchestrator.report import bench
from orchestrator.report.bench import Bench
from orchestrator.settings import load_settings
from orchestrator.store import Store, queries

# Columns in which a reported figure must agree with ours; its dtype may be missing, its device may differ.
_SAME = [*(axis.name for axis in AXES if axis.name not in ("implementation", "dtype", "device")), "metric", "unit"]
_OF_ONE_MACHINE = ("host", "gpu.uuid", "gpu.sm_clock_mhz")


@dataclass(frozen=True)
class Content:
    """Facts of a report.

    Attributes:
        runs: the rows of `queries.run`, in the order requested.
        points: every point of these runs with its state and reason.
        quantities: the quantities that the runs declare.
        scaling: their headline rows of v_scaling, for the charts; only the fullest pass of a bench.
        metrics: their rows of v_metrics.
        fits: the fitted exponents of these rows.
        peers: our rows joined with reported rows of the same shape, depth, batch, dtype, length, pass and metric;
            without benches.
        environments: the distinct environments of the points, as flat text pairs, without host and GPU ids, because
            reports are shared.
        verdicts: the go/no-go verdicts on these runs.
        benches: the runs of kind bench, which have separate tables.
    """

    runs: list[dict[str, Any]]
    points: pd.DataFrame
    quantities: Quantities
    scaling: pd.DataFrame
    metrics: pd.DataFrame
    fits: list[Fit]
    peers: pd.DataFrame
    environments: list[dict[str, str]]
    verdicts: list[TargetVerdict]
    benches: list[Bench]

    @property
    def general(self) -> list[str]:
        """Ids of the runs in the general tables (all kinds but bench)."""
        return [run["run_id"] for run in self.runs if run["kind"] != bench.KIND]

    @property
    def results(self) -> pd.DataFrame:
        """Headline rows of `metrics` of the runs in `general`."""
        rows = self.of_role(Role.HEADLINE)
        return rows.loc[rows["run_id"].isin(self.general)]

    def of_role(self, role: Role) -> pd.DataFrame:
        """Rows of `metrics` whose quantities have this role."""
        names = [name for name in set(self.metrics["metric"]) if self.quantities.of(name).role is role]
        return self.metrics.loc[self.metrics["metric"].isin(names)]

    @property
    def title(self) -> str:
        return "Report: " + ", ".join(dict.fromkeys(in_a_line(run["name"], 100) for run in self.runs))

    @property
    def run_names(self) -> dict[str, str]:
        """Display name of each run, by id."""
        return bench.run_names(self.runs)


def collect(store: Store, run_ids: Sequence[str]) -> Content:
    """Gather the facts of these runs. Raises StoreUnavailable, GatesError."""
    runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None]
    benches = [run["run_id"] for run in runs if run["kind"] == bench.KIND]
    quantities = queries.quantities(store, run_ids)
    scaling = queries.scaling(store, run_ids=run_ids)
    scaling = scaling.loc[scaling["metric"].isin(quantities.names(role=Role.HEADLINE, plots=AGAINST_LENGTH))]
    of_bench = scaling["run_id"].isin(benches)
    fullest = scaling.loc[of_bench].groupby("run_id")["pass"].agg(lambda passes: bench.fullest([*passes]))
    charted = scaling.loc[~of_bench | (scaling["pass"] == scaling["run_id"].map(fullest))]
    grows = scaling["plot"] == Plot.GROWTH
    points = queries.states(store, run_ids=run_ids)
    return Content(
        runs=runs,
        points=points,
        quantities=quantities,
        scaling=charted,
        metrics=queries.measurements(store, run_ids=run_ids),
        fits=scaling_fits(charted),
        peers=_beside_peers(scaling.loc[~of_bench & grows], queries.scaling(store, origin=Origin.REPORTED)),
        environments=_environments(store, points),
        verdicts=evaluate(store, load_gates(load_settings().gates), run_ids),
        benches=bench.collect(store, run_ids),
    )


def _beside_peers(scaling: pd.DataFrame, reported: pd.DataFrame) -> pd.DataFrame:
    """Our measured rows joined with every reported row of the same shape, depth, batch and (if reported) dtype.

    Our dense attention is joined with reported dense attention only.
    """
    ours = scaling[scaling["origin"] == Origin.MEASURED]
    own = more_columns(ours.columns)  # axes that no reported figure has
    ours = ours.loc[pd.DataFrame(ours[own]).isna().all(axis=1)]
    columns = [*_SAME, "implementation", "dtype", "gpu", "value"]
    pairs = pd.DataFrame(ours[columns]).merge(pd.DataFrame(reported[columns]), on=_SAME, suffixes=("", "_reported"))
    ours_is_dense, theirs_is_dense = (
        pairs[name].astype(str).map(bench.is_dense).astype(bool)
        for name in ("implementation", "implementation_reported")
    )
    pairs = pairs.loc[~ours_is_dense | theirs_is_dense]
    pairs = pairs.loc[pairs["dtype_reported"].isna() | (pairs["dtype"] == pairs["dtype_reported"])]
    return pairs.sort_values([*_SAME, "implementation", "value_reported"])


def _environments(store: Store, points: pd.DataFrame) -> list[dict[str, str]]:
    """Distinct environments of each run's first ok point under each interpreter and environment variables.

    One point each: clocks and temperatures differ by point.
    """
    ended = points[points["state"] == "ok"].groupby(["run_id", "env", "python"], dropna=False, sort=False).head(1)
    found = []
    for point_id in ended["point_id"]:
        named = flat((queries.point(store, point_id) or {}).get("environment", {}))
        named = {name: str(value) for name, value in named.items() if name not in _OF_ONE_MACHINE}
        if named and named not in found:
            found.append(named)
    return found


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by their names, joined with dots."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
