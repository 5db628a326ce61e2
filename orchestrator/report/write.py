"""Tables and charts of a report of runs."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from jobs.schema.axes import AXES, more_columns
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import AGAINST_LENGTH, Plot, Quantity, Role, readable
from jobs.schema.states import Origin, PointState, run_in_words
from orchestrator.errors import UserError
from orchestrator.judge.analysis import Fit, fits_frame, scaling_fits
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import TargetVerdict, evaluate
from orchestrator.report import bench
from orchestrator.report.charts import drawable, kind_charts, scaling_chart
from orchestrator.report.compare import Side, compare, summary
from orchestrator.report.runs import answer
from orchestrator.report.series import full_shape, shape
from orchestrator.report.table import Table, flat, points_table
from orchestrator.settings import load_settings
from orchestrator.store import Store, queries

FIRST = ("Runs", "Operator", "Scaling", "Points without a result")  # tables that a reader sees before all else
_NAME = 100  # characters of a run's name
_ANSWERED = 5  # runs that have a sentence
# Columns in which a reported figure must agree with ours; its dtype may be missing, its device may differ.
_SAME = [*(axis.name for axis in AXES if axis.name not in ("implementation", "dtype", "device")), "metric", "unit"]
_OF_ONE_MACHINE = ("host", "gpu.uuid", "gpu.index", "gpu.sm_clock_mhz")  # not in a report, which is shared


def growth_chart(rows: pd.DataFrame, fits: Sequence[Fit], quantity: Quantity) -> dict[str, Any] | None:
    """The chart of a quantity against S, as wide as a page, in Vega-Lite; None without rows to draw."""
    if drawable(rows, quantity).empty:
        return None
    return scaling_chart(rows, fits_frame(fits), quantity).whole | {"width": 640, "height": 340}


class Facts:
    """Content of a report of these runs. Raises StoreUnavailable, GatesError.

    Runs of kind bench have tables of their own, and in the charts only their fullest pass.
    """

    def __init__(self, store: Store, run_ids: Sequence[str]) -> None:
        self.store = store
        self.runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None]
        self.names = bench.run_names(self.runs)
        self.title = "Report: " + ", ".join(dict.fromkeys(in_a_line(run["name"], _NAME) for run in self.runs))
        self.general = [run["run_id"] for run in self.runs if run["kind"] != bench.KIND]
        self.quantities = queries.quantities(store, run_ids)
        self.points = queries.states(store, run_ids=run_ids)
        metrics = queries.measurements(store, run_ids=run_ids)
        roles = {name: self.quantities.of(name).role for name in set(metrics["metric"])}
        self.metrics = metrics.assign(role=[roles[name] for name in metrics["metric"]])
        rows = queries.scaling(store, run_ids=run_ids)
        rows = rows.loc[rows["metric"].isin(self.quantities.names(role=Role.HEADLINE, plots=AGAINST_LENGTH))]
        general = rows["run_id"].isin(self.general)
        both = rows.loc[rows["pass"] == bench.BOTH, "run_id"]
        fullest = np.where(rows["run_id"].isin(both), bench.BOTH, bench.FORWARD)
        self.scaling = rows.loc[general | (rows["pass"] == fullest)]
        self.fits = scaling_fits(self.scaling)
        self.beside = rows.loc[general & (rows["plot"] == Plot.GROWTH)], queries.scaling(store, origin=Origin.REPORTED)
        self.verdicts = evaluate(store, load_gates(load_settings().gates), run_ids)
        self.benches = bench.collect(store, run_ids)
        # Of each run's first ok point under each interpreter and environment: clocks and temperatures differ by point.
        ok = self.points[self.points["state"] == "ok"]
        ok = ok.groupby(["run_id", "env", "python"], dropna=False, sort=False).head(1)
        self.environments: list[dict[str, str]] = []
        for point_id in ok["point_id"]:
            values = flat((queries.point(store, point_id) or {}).get("environment", {}))
            shared = {name: str(value) for name, value in values.items() if name not in _OF_ONE_MACHINE}
            if shared and shared not in self.environments:
                self.environments.append(shared)

    def answers(self) -> Iterator[str]:
        """Sentences: how two runs differ, then what each of the first runs found."""
        if len(ids := [run["run_id"] for run in sorted(self.runs, key=itemgetter("created_at"))]) == 2:
            with suppress(UserError):
                [comparison] = compare(self.store, Side(ids[0], (ids[0],)), [Side(ids[1], (ids[1],))])
                if comparison.cells:
                    yield f"Time of {ids[1]} beside that of {ids[0]}: {summary(comparison)}"
        for run_id in [run["run_id"] for run in self.runs][:_ANSWERED]:
            if said := answer(self.store, run_id):
                yield f"{run_id}: {said}" if len(self.runs) > 1 else said

    def charts(self) -> list[tuple[str, str, Any]]:
        """Name, title and chart in Vega-Lite: of one run those of its kind, then growing quantities over lengths."""
        charts = []
        if len(self.runs) == 1:
            for number, chart in enumerate(kind_charts(self.store, self.runs[0]["run_id"], self.runs[0]["kind"]), 1):
                charts.append((f"{self.runs[0]['kind']}-{number}", chart.title, chart.whole))
        for quantity in self.quantities:
            rows = self.scaling.loc[self.scaling["metric"] == quantity.name]
            grows = quantity.plot is Plot.GROWTH and (len(self.runs) > 1 or len(set(rows["seq_len"])) > 1)
            if grows and (drawn := growth_chart(rows, self.fits, quantity)):
                charts.append((quantity.name, f"{quantity.title} per sequence", drawn))
        return charts

    def tables(self) -> Iterable[Table]:
        on_cpu = set(self.points.loc[self.points["device"] == "cpu", "run_id"])
        rows = []
        for run in self.runs:
            about = [run["run_id"], run["kind"], run["origin"], run_in_words(run), f"{run['ok']} of {run['points']} ok"]
            device = run["gpu"] or ("CPU" if run["run_id"] in on_cpu else "")
            commit = (run["git_commit"] or "")[:10] + " with changes" * bool(run["git_commit"] and run["git_dirty"])
            rows.append([*about, device, f"{run['created_at']:%Y-%m-%d %H:%M} UTC", commit])
        notes = [f"{run['run_id']} {run['state']}: {run['reason']}." for run in self.runs if run["reason"]]
        again = "To measure a point again, with its commit, versions and settings: nsa repro RUN/NUMBER."
        note = " ".join([*notes, *([again] if len(self.points) else [])])
        yield Table("Runs", note, ["run", "kind", "origin", "state", "points", "device", "started", "commit"], rows)
        yield from bench.tables(self.benches)
        yield from _verdicts(self.verdicts)

        general, roles = self.metrics["run_id"].isin(self.general), self.metrics["role"]
        if self.general:
            yield from self._growth_and_results(self.metrics.loc[general & (roles == Role.HEADLINE)])
            yield _beside_reported(*self.beside)
        shown = {
            "Stages": general & (roles == Role.STAGE),
            "Further quantities": roles == Role.DETAIL,
            "Telemetry": roles == Role.TELEMETRY,
        }
        for title, chosen in shown.items():
            if chosen.any():
                yield points_table(title, self.metrics.loc[chosen], self.quantities, self.names)

        axes, points = ["implementation", "pass"], self.points
        counted = points.groupby(axes, dropna=False)["state"].value_counts().unstack(fill_value=0)
        states = [state.value for state in PointState if state.value in counted.columns]
        counted = pd.DataFrame(counted[states]).reset_index().astype(object).fillna("").astype(str)
        yield Table("Points by state", "", [*axes, *states], counted.to_numpy().tolist())
        rows = [
            [self.names[row["run_id"]], str(row["label"]), str(row["state"]), str(row["reason"] or "")]
            for row in points.loc[points["state"] != PointState.OK].to_dict("records")
        ]
        note = "A state other than ok carries no number."
        yield Table("Points without a result", note, ["run", "point", "state", "reason"], rows)
        for number, environment in enumerate(self.environments, 1):
            title = "Environment" if len(self.environments) == 1 else f"Environment {number}"
            yield Table(title, "", ["what", "value"], sorted(environment.items()))

        # Methods that differ only in numbers share a row, and so do all stages.
        named = self.metrics.loc[self.metrics["method"] != "", ["metric", "unit", "method"]]
        alike: dict[tuple[str, str, str, str], dict[str, None]] = {}
        for row in named.drop_duplicates().sort_values("metric").to_dict("records"):
            declared = self.quantities.of(row["metric"], row["unit"])
            metric, title = ("stage_*", "Stage") if declared.role is Role.STAGE else (row["metric"], declared.title)
            alike.setdefault((metric, title, row["unit"], re.sub(r"\d+", "0", row["method"])), {})[row["method"]] = None
        rows = []
        for (*about, _), (method, *others) in alike.items():
            rows.append([*about, method + (f" (and {len(others)} with other numbers)" if others else "")])
        yield Table("How it was measured", "", ["metric", "what it is", "unit", "method"], rows)

    def _growth_and_results(self, headline: pd.DataFrame) -> Iterable[Table]:
        """Fits and headline figures of all runs but those of kind bench."""
        note = (
            f"{bench.GROWTH} It rests on the longest range up to the longest length on which it holds (one on "
            "which it is exact comes first), and has no overhead where the information criterion prefers that."
        )
        fits = [
            {"run": self.names[fit.run_id], "origin": fit.series["origin"]}
            | {name: str(fit.series[name]) for name in ("implementation", "pass")}
            | {"shape": full_shape(fit.series), "metric": fit.metric, **bench.law_cells(fit, fit.local)}
            for fit in self.fits
            if fit.run_id in self.general
        ]
        yield Table.of("Scaling", note, fits)
        places = {name: self.quantities.place(name) for name in set(headline["metric"])}
        order = ["run_id", "metric", "pass", "implementation", "seq_len", "env", "python"]
        ordered = headline.sort_values(order, key=lambda by: by.map(places) if by.name == "metric" else by)
        rows = []
        for row in ordered.to_dict("records"):
            value = readable(row["value"])
            if not pd.isna(row["ci_low"]):
                value += f" ({readable(row['ci_low'])} to {readable(row['ci_high'])})"
            where = [self.names[row["run_id"]], str(row["implementation"]), str(row["pass"]), full_shape(row)]
            rows.append([*where, _whole(row["seq_len"]), _whole(row["batch"]), row["metric"], value, row["unit"]])
        columns = ["run", "implementation", "pass", "shape", "S", "batch", "metric", "value (95 % interval)", "unit"]
        note = "The whole batch; brackets hold the interval of the median, of six samples or more."
        yield Table("Results", note, columns, rows)


def _verdicts(verdicts: Sequence[TargetVerdict]) -> Iterable[Table]:
    """A table for each verdict with evidence, and one of the decisions that these runs are no evidence for."""
    nothing: dict[str, list[str]] = {}
    for verdict in verdicts:
        if not verdict.measured:
            nothing.setdefault(verdict.decision, []).extend([verdict.hardware.title] if verdict.hardware else [])
            continue
        rows = []
        for rule in verdict.rules:
            value = "" if rule.value is None else readable(rule.value, rule.unit)
            margin = "" if rule.margin is None else "+" * (rule.margin >= 0) + readable(rule.margin, rule.unit)
            rows.append([rule.rule, rule.result.value, value, rule.limit, margin, rule.reason])
        title = verdict.title + (f" (on {verdict.hardware.title})" if verdict.hardware else "")
        note = f"{title}. GO needs every rule; a rule without evidence is UNKNOWN."
        if len(verdict.commits) > 1:
            note += f" The evidence comes from several commits: {', '.join(verdict.commits)}."
        columns = ["rule", "result", "value", "bound", "margin", "reason"]
        yield Table(f"Verdict {verdict.name}: {verdict.result.value}", note, columns, rows)
    if nothing:
        note = "These runs are evidence for no rule there; `nsa plan` lists the commands that would settle them."
        rows = [[name, ", ".join(titles) or "any"] for name, titles in nothing.items()]
        yield Table("No verdict", note, ["decision", "hardware"], rows)


def _beside_reported(ours: pd.DataFrame, reported: pd.DataFrame) -> Table:
    """Our measured rows beside every reported row of the same shape, depth, batch and (if reported) dtype; our dense
    attention beside reported dense attention only."""
    ours = ours.loc[ours["origin"] == Origin.MEASURED]
    ours = ours.loc[pd.DataFrame(ours[more_columns(ours.columns)]).isna().all(axis=1)]  # no reported figure has these
    columns = [*_SAME, "implementation", "dtype", "gpu", "value"]
    pairs = pd.DataFrame(ours[columns]).merge(pd.DataFrame(reported[columns]), on=_SAME, suffixes=("", "_reported"))
    pairs = pairs.loc[pairs["dtype_reported"].isna() | (pairs["dtype"] == pairs["dtype_reported"])]
    rows = []
    for row in pairs.sort_values([*_SAME, "implementation", "value_reported"]).to_dict("records"):
        name, other = str(row["implementation"]), str(row["implementation_reported"])
        if bench.is_dense(other) or not bench.is_dense(name):
            where = [name, str(row["pass"]), shape(row), _whole(row["seq_len"]), _whole(row["batch"])]
            measured = f"{readable(row['value'])} on {row['gpu'] or 'CPU'}"
            reported_value = f"{readable(row['value_reported'])} on {row['gpu_reported']}"
            ratio = readable(row["value"] / row["value_reported"])
            rows.append([*where, f"{row['metric']} [{row['unit']}]", measured, reported_value, other, ratio])
    note = "Same shape, dtype, length, batch and pass. Below 1, ours takes less. Mind the device of each figure."
    columns = ["ours", "pass", "shape", "S", "batch", "metric", "measured", "reported", "reported of", "ratio"]
    return Table("Beside reported figures", note, columns, rows)


def _whole(value: float | None) -> str:
    """A whole number with thousands separators; empty for None and NaN."""
    return "" if value is None or pd.isna(value) else f"{int(value):,}"
