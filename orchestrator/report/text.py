"""Text and tables of a report, as Markdown or as one HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from jobs.schema.plain_text import for_file, for_html, in_a_line
from jobs.schema.quantities import Quantity, Role
from jobs.schema.states import PointState
from orchestrator.judge.analysis import Fit
from orchestrator.judge.verdicts import TargetVerdict
from orchestrator.report import bench_text
from orchestrator.report.content import Content
from orchestrator.report.table import Table, shape, shape_of, whole

_NAME = 100  # characters of a run's name or a quantity's title
_NOTE = 4_000


def to_markdown(content: Content, charts: Mapping[Quantity, str]) -> str:
    """The report in Markdown; `charts`: image file of each drawn quantity."""
    parts = [f"# {for_file(_title(content))}"]
    for quantity, file in charts.items():
        title = re.sub(r"[\[\]<>`\\]", " ", in_a_line(f"{quantity.title} per sequence", _NAME))
        parts.append(f"![{title}]({file})")
    for table in _tables(content):
        parts.append(f"## {for_file(table.title)}")
        parts += [for_file(table.note, _NOTE)] if table.note else []
        parts.append(table.markdown() if table.rows else "None.")
    return "\n\n".join(parts) + "\n"


def to_html(content: Content, charts: Mapping[Quantity, str]) -> str:
    """The report as one self-contained HTML file; `charts`: SVG text of each drawn quantity."""
    parts = [f"<h1>{for_html(_title(content))}</h1>"]
    for quantity, svg in charts.items():
        title = for_html(f"{quantity.title} per sequence")
        parts.append(f"<figure><figcaption>{title}</figcaption>{svg}</figure>")
    for table in _tables(content):
        parts.append(f"<h2>{for_html(table.title)}</h2>")
        parts += [f"<p>{for_html(table.note, _NOTE)}</p>"] if table.note else []
        parts.append(table.html() if table.rows else "<p>None.</p>")
    title = for_html(_title(content))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _title(content: Content) -> str:
    names = list(dict.fromkeys(in_a_line(run["name"], _NAME) for run in content.runs))
    return "Report: " + ", ".join(names)


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
            _commit(run),
        ]
        for run in content.runs
    ]
    note = " ".join(f"{run['run_id']} {run['state']}: {run['reason']}." for run in content.runs if run["reason"])
    return Table("Runs", note, ["run", "kind", "origin", "state", "points", "device", "started", "commit"], rows)


def _commit(run: Mapping) -> str:
    return "" if not run["git_commit"] else run["git_commit"][:10] + (" with changes" if run["git_dirty"] else "")


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
            shape_of(fit.series),
            fit.metric,
            f"{fit.exponent:.3f}",
            f"{fit.ci_low:.3f} to {fit.ci_high:.3f}",
            f"{fit.lengths[0]:,} to {fit.lengths[-1]:,}",
            f"{fit.n}",
            f"{fit.overhead:.3g}" if fit.overhead else "",
            f"{100 * fit.residual:.1f} %",
            f"{fit.plain.exponent:.3f}",
            fit.local_text,
        ]
        for fit in fits
    ]
    note = (
        "Asymptotic exponent p of value = overhead + c · S^p, per sequence, on the longest range up to the longest "
        "length on which the law holds (one on which it is exact comes first); without an overhead where the "
        "information criterion prefers that. All lengths: the slope of a line through all of them. " + bench_text.LOCAL
    )
    axes = ["run", "origin", "implementation", "pass", "shape", "metric"]
    law = ["exponent", "95 % interval", "S", "n", "overhead", "residual", "all lengths", "local exponents"]
    return Table("Scaling", note, [*axes, *law], rows)


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
            shape_of(row),
            whole(row["seq_len"]),
            whole(row["batch"]),
            str(row["metric"]),
            f"{row['value']:,.4g}"
            + ("" if pd.isna(row["ci_low"]) else f" ({row['ci_low']:,.4g} to {row['ci_high']:,.4g})"),
            str(row["unit"]),
        ]
        for row in ordered.to_dict("records")
    ]
    columns = ["run", "implementation", "pass", "shape", "S", "batch", "metric", "value (95 % interval)", "unit"]
    return Table("Results", "The whole batch; brackets hold the interval of the median.", columns, rows)


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
        [*point, *(f"{found[one]:,.4g}" if one in found else "" for one in columns)] for point, found in values.items()
    ]
    headings = [name if unit == "1" else f"{name} [{unit}]" for name, unit in columns]
    yield Table(title, "", ["run", "point", *headings], rows)


def _peers(peers: pd.DataFrame) -> Table:
    rows = [
        [
            str(row["implementation"]),
            str(row["pass"]),
            shape(row["query_heads"], row["kv_heads"], row["head_dim"], None),
            whole(row["seq_len"]),
            whole(row["batch"]),
            f"{row['metric']} [{row['unit']}]",
            f"{row['value']:,.4g} on {row['gpu'] or 'CPU'}",
            f"{row['value_reported']:,.4g} on {row['gpu_reported']}",
            str(row["implementation_reported"]),
            f"{row['value'] / row['value_reported']:.3g}",
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


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:13px}"
    "th,td{text-align:left;padding:.25rem .7rem;border-bottom:1px solid #ddd;vertical-align:top}"
    "figure{margin:1.5rem 0}svg{max-width:100%;height:auto}"
)
