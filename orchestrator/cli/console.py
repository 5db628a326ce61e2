"""Prints the commands' results: rich tables of query rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from rich.text import Text

from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import readable, readable_interval
from jobs.schema.states import again_in_words, phase_in_words, reason_in_words, run_in_words
from orchestrator.report.runs import table as list_of_runs
from orchestrator.report.table import Table
from orchestrator.store import Store
from orchestrator.terminal import say, wide_console

if TYPE_CHECKING:  # each command imports what it needs itself
    from orchestrator.cli.services import Service
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.steps import Step

out = wide_console()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    out.print(Table(title, "", columns, list(rows)).rich(fold=True))


def show(table: Table, format: Literal["text", "md"]) -> None:
    """Print a table with its note, for the terminal or as Markdown."""
    if format == "md":
        say(f"### {table.title}\n\n{table.note}\n\n{table.markdown()}\n")
        return
    if table.rows:
        out.print(table.rich())
    if table.note:
        say(table.note)


def services(found: Sequence[Service]) -> None:
    rows = []
    for service in found:
        pid, healthy = service.pid, service.healthy
        state = "ok" if healthy else "not running" if pid is None else "starting"
        rows.append((service.name, service.url, state, str(pid or ("started elsewhere" if healthy else ""))))
    table("Services", ["service", "address", "state", "pid"], rows)


def runs(store: Store, frame: pd.DataFrame, *, title: str) -> None:
    if frame.empty:
        out.print(f"{title}: none")
    else:
        out.print(list_of_runs(store, frame, title).rich(fold=True))


def run(row: Mapping[str, Any], points: pd.DataFrame, events: pd.DataFrame) -> None:
    fields = ("run_id", "kind", "state", "answer", "origin", "source", "git_commit", "git_branch", "git_dirty")
    row = {**row, "state": run_in_words(row)}
    _fields(
        row, (*fields, "code_hash", "submission_id", "person", "tags", "notes", "host", "artifacts", "artifact_store")
    )
    rows = []
    for p in points.to_dict("records"):
        reason = "; ".join(filter(None, (reason_in_words(p), again_in_words(p))))
        rows.append((_text(p["number"]), p["label"], p["state"], phase_in_words(p), reason))
    table("Points", ["#", "label", "state", "progress", "reason"], rows)
    for event in events.to_dict("records"):
        out.print(f"{_text(event['at'])} {event['level']}: {in_a_line(event['message'])}")


def point(row: Mapping[str, Any], metrics: pd.DataFrame, files: pd.DataFrame) -> None:
    row = {**row, "again": again_in_words(row) or None, "reason": reason_in_words(row)}
    names = ("point_id", "label", "state", "reason", "again", "attempt", "key", "started_at", "ended_at", "route")
    _fields(row, (*names, "config"))
    rows = []
    for m in metrics.to_dict("records"):
        unit = m["unit"]
        interval = readable_interval(m["ci_low"], m["ci_high"], m["samples"], unit, to=" .. ")
        p10, p90 = ("" if pd.isna(m[name]) else readable(m[name], unit) for name in ("p10", "p90"))
        count = str(max(1, len(m["samples"] or ())))
        rows.append((m["name"], readable(m["value"], unit), p10, p90, interval, count, m["method"]))
    if rows:
        table("Metrics", ["metric", "value", "p10", "p90", "95 % interval", "n", "method"], rows)
    else:
        out.print("no metrics: only points that are ok have any")
    for file in files.to_dict("records"):
        out.print(f"artifact: {in_a_line(file['name'], 100)}")


def artifacts(files: pd.DataFrame) -> None:
    for f in files.to_dict("records"):
        out.rule(Text(in_a_line(f["name"], 100) + (" (its end)" if f["truncated"] else "")))
        out.print(f"not stored as text; see {f['path']}" if pd.isna(f["content"]) or not f["content"] else f["content"])
    if files.empty:
        out.print("this point has no artifacts")


def plan(decisions: Sequence[Decision]) -> None:
    """Print what would settle each decision's open rules: the commands in their order, then what no command settles."""
    for decision in decisions:
        out.print(f"{decision.name}: {decision.title}", style="bold")
        out.print(f"  {' '.join(decision.sentences)}")
        commands = [step for step in decision.steps if step.command]
        for number, step in enumerate(commands, 1):
            out.print(f"  {number}. {step.command}", style="cyan")
            out.print(f"     {cost(step)}\n     settles {', '.join(step.settles)} on {step.hardware}")
        others = [step for step in decision.steps if not step.command]
        if others or not commands:
            out.print("  no command settles:" if others else "  nothing is open")
        for step in others:
            out.print(f"    {', '.join(step.settles)} on {step.hardware}: {step.lacking}")


def cost(step: Step) -> str:
    """A step's GPUs and predicted minutes with their ground."""
    gpus = f"{step.gpus} GPU{'s' if step.gpus > 1 else ''}" if step.gpus else "no GPU"
    if step.minutes is None:
        return f"{gpus}; duration {step.basis}"
    price = "" if step.cost is None else f", ${step.cost:.2f}"
    return f"{gpus}, about {max(1, round(step.minutes))} min{price} ({step.basis})"


def _fields(row: Mapping[str, Any], names: Sequence[str]) -> None:
    width = max(map(len, names))
    for name in names:
        if row.get(name) not in (None, "") and not (isinstance(row[name], float) and pd.isna(row[name])):
            out.print(f"{name:<{width}}  {in_a_line(row[name], 4_000)}")


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return "" if pd.isna(value) else f"{value:%Y-%m-%d %H:%M:%S}"
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    return readable(value) if isinstance(value, float) else str(value)
