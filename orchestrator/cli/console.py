"""Prints the commands' results: rich tables of query rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import readable, readable_range
from jobs.schema.states import again_in_words
from orchestrator.report.summary import wide_console
from orchestrator.terminal import say, warn

if TYPE_CHECKING:
    from orchestrator.cli.doctor import Finding, SettingRow
    from orchestrator.cli.services import Exposure, ServiceStatus
    from orchestrator.execute.artifacts import StoredFile
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.steps import Step

_COLOUR = {"ok": "green", "done": "green", "running": "cyan", "pending": "bright_black", "skipped": "bright_black"}
_COLOUR |= {"missing": "yellow", "broken": "red"}

out = wide_console()


def settings(rows: Sequence[SettingRow]) -> None:
    table = _table("Settings", "variable", "value", "source", "meaning")
    for row in rows:
        table.add_row(row.variable, row.value, row.source, row.meaning)
    out.print(table)


def findings(found: Sequence[Finding]) -> None:
    from orchestrator.cli.doctor import Health

    table = _table("Checks", "check", "state", "detail", "to mend it")
    for f in found:
        table.add_row(f.name, _state(f.health), f.detail, "" if f.health is Health.OK else f.fix)
    out.print(table)


def services(rows: Sequence[ServiceStatus]) -> None:
    table = _table("Services", "service", "address", "state", "pid")
    for s in rows:
        state = "ok" if s.healthy else "not running" if s.pid is None else "starting"
        table.add_row(s.name, s.url, _state(state), str(s.pid or ("started elsewhere" if s.healthy else "")))
    out.print(table)


def access(token: str | None, found: Sequence[Exposure]) -> None:
    """Print who may use the Ray cluster. `token`: the place of its token; None if it asks for none."""
    if token:
        say(f"token: {token}; plain `ray` commands send it with RAY_AUTH_MODE=token, which `make env` sets in .venv")
    for one in found:
        warn(f"warning: {one.what}; {one.fix}")


def runs(frame: pd.DataFrame, *, title: str) -> None:
    table = _table(title, "run", "kind", "origin", "state", "points", "ok", "failed", "created (UTC)")
    for row in frame.to_dict("records"):
        table.add_row(
            row["run_id"], row["kind"], row["origin"], _state(row["state"]), _text(row["points"]), _text(row["ok"]),
            _text(row["failed"]), _time(row["created_at"]),
        )  # fmt: skip
    out.print(table if len(frame) else f"{title}: none")


def run(row: Mapping[str, Any] | None, points: pd.DataFrame, events: pd.DataFrame) -> None:
    if row is None:
        return
    fields = ("run_id", "kind", "state", "origin", "source", "git_commit", "git_branch", "git_dirty", "code_hash")
    _fields(row, (*fields, "submission_id", "host", "artifacts", "artifact_store"))
    table = _table("Points", "#", "label", "state", "progress", "reason")
    for p in points.to_dict("records"):
        progress = ""
        if p["running"] and not pd.isna(p["phase"]):
            progress = f"{p['phase']} {p['done']:.0f}/{p['total']:.0f}" if p["total"] else str(p["phase"])
        reason = "; ".join(filter(None, (_text(p["reason"]), again_in_words(p))))
        table.add_row(_text(p["number"]), p["label"], _state(p["state"]), progress, reason)
    out.print(table)
    for event in events.to_dict("records"):
        out.print(f"{_time(event['at'])} {event['level']}: {in_a_line(event['message'])}", markup=False)


def point(row: Mapping[str, Any], metrics: pd.DataFrame, files: pd.DataFrame) -> None:
    row = {**row, "again": again_in_words(row) or None}
    names = ("point_id", "label", "state", "reason", "again", "attempt", "key", "started_at", "ended_at", "route")
    _fields(row, (*names, "config"))
    table = _table("Metrics", "metric", "value", "p10", "p90", "95 % interval", "n", "method")
    for m in metrics.to_dict("records"):
        unit = m["unit"]
        interval = "" if pd.isna(m["ci_low"]) else readable_range(m["ci_low"], m["ci_high"], unit, to=" .. ")
        p10, p90 = ("" if pd.isna(m[name]) else readable(m[name], unit) for name in ("p10", "p90"))
        table.add_row(
            m["name"], readable(m["value"], unit), p10, p90, interval,
            str(max(1, len(m["samples"] or ()))), m["method"],
        )  # fmt: skip
    out.print(table if len(metrics) else "no metrics: only points that are ok have any")
    for name in files["name"] if len(files) else ():
        out.print(f"artifact: {_name(name)}", markup=False)


def artifacts(files: pd.DataFrame) -> None:
    for f in files.to_dict("records"):
        out.rule(Text(_name(f["name"]) + (" (its end)" if f["truncated"] else "")))
        text = "" if pd.isna(f["content"]) else f["content"]
        out.print(text or f"not stored as text; see {f['path']}", markup=False)
    if files.empty:
        out.print("this point has no artifacts")


def files(found: Sequence[StoredFile]) -> None:
    table = _table("Files", "point", "attempt", "name", "bytes", "sha256")
    for file in found:
        table.add_row(str(file.point), str(file.attempt), _name(file.name), str(file.size), file.sha256)
    out.print(table if found else "no files were kept")


def plan(decisions: Sequence[Decision]) -> None:
    """Print what would settle each decision's open rules: the commands in their order, then what no command settles."""
    for decision in decisions:
        out.print(f"{decision.name}: {decision.title}", style="bold", markup=False)
        out.print(f"  {decision.sentence}", markup=False, soft_wrap=True)
        commands = [step for step in decision.steps if step.command]
        others = [step for step in decision.steps if not step.command]
        for number, step in enumerate(commands, 1):
            out.print(f"  {number}. {step.command}", style="cyan", markup=False, soft_wrap=True)
            out.print(f"     {cost(step)}", markup=False, soft_wrap=True)
            out.print(f"     settles {', '.join(step.settles)} on {step.hardware}", markup=False, soft_wrap=True)
        if others or not commands:
            out.print("  no command settles:" if others else "  nothing is open")
        for step in others:
            text = f"    {', '.join(step.settles)} on {step.hardware}: {step.lacking}"
            out.print(text, markup=False, soft_wrap=True)


def cost(step: Step) -> str:
    """A step's GPUs and predicted minutes with their ground."""
    gpus = f"{step.gpus} GPU{'s' if step.gpus > 1 else ''}" if step.gpus else "no GPU"
    if step.minutes is None:
        return f"{gpus}; duration {step.basis}"
    return f"{gpus}, about {max(1, round(step.minutes))} min ({step.basis})"


class _Plain(Table):
    """A table that shows text as it is, in lines of its own, without reading markup in a run's messages."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(in_a_line(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


def _table(title: str | None, *columns: str) -> Table:
    table = _Plain(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _fields(row: Mapping[str, Any], names: Sequence[str]) -> None:
    width = max(map(len, names))
    for name in names:
        if row.get(name) is not None and not (isinstance(row[name], float) and pd.isna(row[name])):
            out.print(f"{name:<{width}}  {in_a_line(row[name], 4_000)}", markup=False)


def _name(name: str) -> str:
    """A file's name in ASCII, at most 100 characters: an imported journal may hold any text."""
    return ascii(name if len(name) <= 100 else f"{name[:97]}...")[1:-1]


def _state(state: str) -> Text:
    return Text(str(state), style=_COLOUR.get(str(state), "red"))


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return ""
    return readable(value) if isinstance(value, float) else str(value)


def _time(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:%Y-%m-%d %H:%M:%S}"
