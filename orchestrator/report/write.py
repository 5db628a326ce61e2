"""Report files: Markdown with charts beside it, HTML in one file, CSV, JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from jobs.schema.plain_text import for_file, for_html, in_a_line, printable
from jobs.schema.quantities import Plot, Quantity, Role, readable
from jobs.schema.states import PointState
from jobs.specs.user_files import write_output
from orchestrator.errors import UserError
from orchestrator.judge.analysis import Fit, fits_frame
from orchestrator.judge.verdicts import TargetVerdict
from orchestrator.report import bench_text
from orchestrator.report.content import Content, collect
from orchestrator.report.series import full_shape, shape
from orchestrator.report.table import Table, whole
from orchestrator.settings import example_spec
from orchestrator.store import Store
from orchestrator.store.exporter import to_csv, to_json

FORMATS = ("md", "html", "csv", "json")
_NAME = 100  # characters of a run's name or a quantity's title
_NOTE = 4_000


class ReportError(UserError):
    """The report cannot be written; the message names field, value and fix."""


def report(store: Store, run_ids: Sequence[str], *, format: str = "md") -> str:
    """The report as text, in one of FORMATS; only HTML includes charts. Raises ReportError if there are no runs."""
    if not run_ids:
        raise ReportError(f"RUN: no runs are stored; submit one: nsa submit {example_spec()}")
    if format in ("csv", "json"):
        return (to_csv if format == "csv" else to_json)(store, run_ids)
    content = collect(store, run_ids)
    if format == "md":
        return _markdown(content, charts={})
    return _html(content, {quantity: svg(chart) for quantity, chart in _charts(content).items()})


def write_report(store: Store, run_ids: Sequence[str], path: Path) -> list[Path]:
    """Write the report to `path` in the format of its suffix; Markdown gets a PNG file per chart. Returns the files.

    Raises:
        ReportError: the suffix is unknown, there are no runs, or a file cannot be written.
    """
    suffix, images = path.suffix.removeprefix("."), dict[Quantity, Path]()
    if suffix not in FORMATS:
        raise ReportError(f"out: '{path}' has an unknown suffix; use .md, .html, .csv or .json")
    try:
        if suffix == "md" and run_ids:
            content = collect(store, run_ids)
            for quantity, chart in _charts(content).items():
                images[quantity] = path.with_name(f"{path.stem}-{re.sub(r'[^a-z0-9]+', '-', quantity.name)}.png")
                write_output(images[quantity], png(chart))
            text = _markdown(content, {quantity: quote(image.name) for quantity, image in images.items()})
        else:
            text = report(store, run_ids, format=suffix)
        write_output(path, text)
    except OSError as err:
        raise ReportError(f"out: '{path}' cannot be written ({err.strerror}); choose another place") from None
    return [path, *images.values()]


def _charts(content: Content) -> dict[Quantity, Any]:
    """Charts of the growing quantities that have rows to draw."""
    growing = [quantity for quantity in content.quantities if quantity.plot is Plot.GROWTH]
    drawn = {quantity: growth_chart(content.scaling, content.fits, quantity) for quantity in growing}
    return {quantity: chart for quantity, chart in drawn.items() if chart is not None}


def growth_chart(rows: pd.DataFrame, fits: Sequence[Fit], quantity: Quantity) -> Any:
    """The chart of a quantity against S, as wide as a page; None without rows to draw. Imports Altair only here."""
    if sys.flags.optimize > 1:
        raise ReportError("PYTHONOPTIMIZE: 2: Altair draws no charts without docstrings; set it to 1, or unset it")
    from orchestrator.report.scaling_chart import drawable, scaling_chart

    if drawable(rows, quantity).empty:
        return None
    return scaling_chart(rows, fits_frame(fits), quantity)[0].properties(width=640)


def png(chart: Any) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(_printable(chart.to_dict()), scale=2)


def svg(chart: Any) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(_printable(chart.to_dict()))


def _printable(part: Any) -> Any:
    """The part of a chart, its texts printable: an image's XML cannot hold controls."""
    if isinstance(part, dict):
        return {name: _printable(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_printable(value) for value in part]
    return printable(part) if isinstance(part, str) else part


def _markdown(content: Content, charts: Mapping[Quantity, str]) -> str:
    """The report in Markdown; `charts`: image file of each drawn quantity."""
    parts = [f"# {for_file(content.title)}"]
    for quantity, file in charts.items():
        title = re.sub(r"[\[\]<>`\\]", " ", in_a_line(f"{quantity.title} per sequence", _NAME))
        parts.append(f"![{title}]({file})")
    for table in _tables(content):
        parts.append(f"## {for_file(table.title)}")
        parts += [for_file(table.note, _NOTE)] if table.note else []
        parts.append(table.markdown() if table.rows else "None.")
    return "\n\n".join(parts) + "\n"


def _html(content: Content, charts: Mapping[Quantity, str]) -> str:
    """The report as one self-contained HTML file; `charts`: SVG text of each drawn quantity."""
    name = for_html(content.title)
    parts = [f"<h1>{name}</h1>"]
    for quantity, svg in charts.items():
        title = for_html(f"{quantity.title} per sequence")
        parts.append(f"<figure><figcaption>{title}</figcaption>{svg}</figure>")
    for table in _tables(content):
        parts.append(f"<h2>{for_html(table.title)}</h2>")
        parts += [f"<p>{for_html(table.note, _NOTE)}</p>"] if table.note else []
        parts.append(table.html() if table.rows else "<p>None.</p>")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:13px}"
    "th,td{text-align:left;padding:.25rem .7rem;border-bottom:1px solid #ddd;vertical-align:top}"
    "figure{margin:1.5rem 0}svg{max-width:100%;height:auto}"
)


def _tables(content: Content) -> Iterable[Table]:
    yield _runs(content)
    yield from bench_text.tables(content.benches)
    for verdict in content.verdicts:
        if verdict.measured:
            yield _verdict(verdict)
    yield from _unjudged([verdict for verdict in content.verdicts if not verdict.measured])
    if general := content.general:
        yield _fits([fit for fit in content.fits if fit.run_id in general], content.run_names)
        yield _measured(content)
        yield _peers(content.peers)
        stages = content.of_role(Role.STAGE)
        yield from _wide("Stages", stages.loc[stages["run_id"].isin(general)], content)
    yield from _wide("Further quantities", content.of_role(Role.DETAIL), content)
    yield from _wide("Telemetry", content.of_role(Role.TELEMETRY), content)
    yield _states(content.points)
    yield _failures(content.points, content.run_names)
    for number, environment in enumerate(content.environments, 1):
        title = "Environment" if len(content.environments) == 1 else f"Environment {number}"
        yield Table(title, "", ["what", "value"], [[name, value] for name, value in sorted(environment.items())])
    yield _methods(content)


def _runs(content: Content) -> Table:
    on_cpu = set(content.points.loc[content.points["device"] == "cpu", "run_id"])
    rows = [
        [
            str(run["run_id"]),
            str(run["kind"]),
            str(run["origin"]),
            str(run["state"]),
            f"{run['ok']} of {run['points']} ok",
            str(run["gpu"] or ("CPU" if run["run_id"] in on_cpu else "")),
            f"{run['created_at']:%Y-%m-%d %H:%M} UTC",
            (run["git_commit"] or "")[:10] + (" with changes" if run["git_commit"] and run["git_dirty"] else ""),
        ]
        for run in content.runs
    ]
    note = " ".join(f"{run['run_id']} {run['state']}: {run['reason']}." for run in content.runs if run["reason"])
    return Table("Runs", note, ["run", "kind", "origin", "state", "points", "device", "started", "commit"], rows)


def _verdict(verdict: TargetVerdict) -> Table:
    columns = ["rule", "result", "value", "bound", "margin", "reason"]
    title = f"Verdict {verdict.name}: {verdict.result.value}"
    rows = [
        [
            rule.rule,
            rule.result.value,
            "" if rule.value is None else rule.told(rule.value),
            rule.limit,
            "" if rule.margin is None else "+" * (rule.margin >= 0) + rule.told(rule.margin),
            rule.reason,
        ]
        for rule in verdict.rules
    ]
    note = f"{verdict.full_title}. GO needs every rule; a rule without evidence is UNKNOWN."
    if len(verdict.commits) > 1:
        note += f" The rules rest on different commits: {', '.join(verdict.commits)}."
    return Table(title, note, columns, rows)


def _unjudged(verdicts: Sequence[TargetVerdict]) -> Iterable[Table]:
    """A table with a line per decision that these runs are no evidence for on some hardware; none without."""
    hardware: dict[str, list[str]] = {}
    for verdict in verdicts:
        titles = hardware.setdefault(verdict.decision, [])
        titles += [verdict.hardware.title] if verdict.hardware else []
    if hardware:
        rows = [[name, ", ".join(titles) or "any"] for name, titles in hardware.items()]
        note = "These runs are evidence for no rule there; `nsa plan` lists the commands that would settle them."
        yield Table("No verdict", note, ["decision", "hardware"], rows)


def _fits(fits: Sequence[Fit], names: Mapping[str, str]) -> Table:
    rows = [
        [
            names[fit.run_id],
            fit.series["origin"],
            str(fit.series["implementation"]),
            str(fit.series["pass"]),
            full_shape(fit.series),
            fit.metric,
            *bench_text.law_cells(fit, fit.local),
        ]
        for fit in fits
    ]
    note = (
        f"{bench_text.GROWTH} It rests on the longest range up to the longest length on which it holds (one on which "
        "it is exact comes first), and has no overhead where the information criterion prefers that."
    )
    axes = ["run", "origin", "implementation", "pass", "shape", "metric"]
    return Table("Scaling", note, [*axes, *bench_text.LAW], rows)


def _measured(content: Content) -> Table:
    results = content.results
    places = {name: content.quantities.place(name) for name in set(results["metric"])}
    order = ["run_id", "metric", "pass", "implementation", "seq_len", "env", "python"]
    ordered = results.sort_values(order, key=lambda column: column.map(places) if column.name == "metric" else column)
    rows = [
        [
            content.run_names[row["run_id"]],
            str(row["implementation"]),
            str(row["pass"]),
            full_shape(row),
            whole(row["seq_len"]),
            whole(row["batch"]),
            str(row["metric"]),
            readable(row["value"])
            + ("" if pd.isna(row["ci_low"]) else f" ({readable(row['ci_low'])} to {readable(row['ci_high'])})"),
            str(row["unit"]),
        ]
        for row in ordered.to_dict("records")
    ]
    columns = ["run", "implementation", "pass", "shape", "S", "batch", "metric", "value (95 % interval)", "unit"]
    return Table(
        "Results", "The whole batch; brackets hold the interval of the median, of six samples or more.", columns, rows
    )


def _wide(title: str, metrics: pd.DataFrame, content: Content) -> Iterable[Table]:
    """A table with a row per point and a column per quantity; none without metrics."""
    if metrics.empty:
        return
    columns = sorted(
        set(zip(metrics["metric"], metrics["unit"], strict=True)),
        key=lambda one: (content.quantities.place(one[0]), one),
    )
    values: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for row in metrics.to_dict("records"):
        point = content.run_names[row["run_id"]], row["label"]
        values.setdefault(point, {})[row["metric"], row["unit"]] = row["value"]
    rows = [
        [*point, *(readable(found[one]) if one in found else "" for one in columns)] for point, found in values.items()
    ]
    headings = [name if unit == "1" else f"{name} [{unit}]" for name, unit in columns]
    yield Table(title, "", ["run", "point", *headings], rows)


def _peers(peers: pd.DataFrame) -> Table:
    rows = [
        [
            str(row["implementation"]),
            str(row["pass"]),
            shape(row),
            whole(row["seq_len"]),
            whole(row["batch"]),
            f"{row['metric']} [{row['unit']}]",
            f"{readable(row['value'])} on {row['gpu'] or 'CPU'}",
            f"{readable(row['value_reported'])} on {row['gpu_reported']}",
            str(row["implementation_reported"]),
            readable(row["value"] / row["value_reported"]),
        ]
        for row in peers.to_dict("records")
    ]
    note = "Same shape, dtype, length, batch and pass. Below 1, ours takes less. Mind the device of each figure."
    columns = ["ours", "pass", "shape", "S", "batch", "metric", "measured", "reported", "reported of", "ratio"]
    return Table("Beside reported figures", note, columns, rows)


def _states(points: pd.DataFrame) -> Table:
    counted = points.groupby(["implementation", "pass"], dropna=False)["state"].value_counts().unstack(fill_value=0)
    tallies: list[dict] = [dict(row) for _, row in counted.iterrows()]
    states = [state.value for state in PointState if state.value in counted.columns]
    rows = [
        [*("" if pd.isna(name) else str(name) for name in names), *(str(int(row[state])) for state in states)]
        for names, row in zip(counted.index, tallies, strict=True)
    ]
    return Table("Points by state", "", ["implementation", "pass", *states], rows)


def _failures(points: pd.DataFrame, names: Mapping[str, str]) -> Table:
    others = points.loc[points["state"] != PointState.OK.value]
    rows = [
        [names[row["run_id"]], str(row["label"]), str(row["state"]), str(row["reason"] or "")]
        for row in others.to_dict("records")
    ]
    note = "A state other than ok carries no number."
    return Table("Points without a result", note, ["run", "point", "state", "reason"], rows)


def _methods(content: Content) -> Table:
    """Table of measurement methods; methods that differ only in numbers share a row, and so do all stages."""
    metrics = content.metrics
    named = metrics.loc[metrics["method"] != "", ["metric", "unit", "method"]].drop_duplicates().sort_values("metric")
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for row in named.to_dict("records"):
        declared = content.quantities.of(row["metric"], row["unit"])
        family = declared.role is Role.STAGE
        metric, title = ("stage_*", "Stage") if family else (row["metric"], declared.title)
        shown = alike.setdefault((metric, title, row["unit"], re.sub(r"\d+", "0", row["method"])), [])
        shown += [row["method"]] if row["method"] not in shown else []
    rows = [
        [metric, title, unit, methods[0] + (f" (and {len(methods) - 1} with other numbers)" if methods[1:] else "")]
        for (metric, title, unit, _), methods in alike.items()
    ]
    return Table("How it was measured", "", ["metric", "what it is", "unit", "method"], rows)
