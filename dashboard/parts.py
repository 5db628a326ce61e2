"""Formatting shared by the pages: states, numbers, times and links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlencode
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pandas as pd
import streamlit as st

from jobs.schema import plain_text
from jobs.schema.quantities import readable, readable_bytes
from jobs.schema.states import Origin, PointState, Result, RunState, phase_in_words
from orchestrator.report import series

if TYPE_CHECKING:
    from orchestrator.judge.verdicts import RuleVerdict

Color = Literal["red", "orange", "blue", "green", "gray", "violet"]


class Look(NamedTuple):
    """Appearance of a state: icon, colour and sign; the name is always shown, too."""

    icon: str
    color: Color
    sign: str  # for grid cells, which have no icon font


RESULTS: Mapping[str, Look] = {
    Result.GO: Look("check_circle", "green", "✓"),
    Result.NO_GO: Look("cancel", "red", "✗"),
    Result.UNKNOWN: Look("help", "gray", "?"),
}
_FAILURE = "red"
POINT_STATES: Mapping[str, Look] = {
    PointState.PENDING: Look("hourglass_empty", "gray", "·"),
    PointState.RUNNING: Look("autorenew", "blue", "▶"),
    PointState.OK: Look("check_circle", "green", "✓"),
    PointState.OOM: Look("memory", _FAILURE, "✗"),
    PointState.TIMEOUT: Look("timer_off", _FAILURE, "✗"),
    PointState.HANG: Look("hourglass_disabled", _FAILURE, "✗"),
    PointState.CRASH: Look("bolt", _FAILURE, "✗"),
    PointState.ERROR: Look("error", _FAILURE, "✗"),
    PointState.LOST: Look("link_off", _FAILURE, "✗"),
    PointState.SKIPPED: Look("skip_next", "orange", "»"),
    PointState.CANCELLED: Look("block", "gray", "–"),
}
RUN_STATES: Mapping[str, Look] = {
    RunState.PENDING: POINT_STATES[PointState.PENDING],
    RunState.RUNNING: POINT_STATES[PointState.RUNNING],
    RunState.DONE: POINT_STATES[PointState.OK],
    RunState.CANCELLED: POINT_STATES[PointState.CANCELLED],
    RunState.FAILED: POINT_STATES[PointState.ERROR],
}
ORIGINS: Mapping[str, Look] = {
    Origin.MEASURED: Look("straighten", "blue", "●"),
    Origin.REPORTED: Look("article", "violet", "◇"),
}
_LINKS = 6  # to the evidence of a rule
_UNKNOWN_LOOK = Look("help", "gray", "?")


def badge(name: str, looks: Mapping[str, Look]) -> str:
    """Coloured badge in Markdown, for text and static tables."""
    look = looks.get(name, _UNKNOWN_LOOK)
    return f":{look.color}-badge[:material/{look.icon}: {name}]"


def sign(name: str, looks: Mapping[str, Look]) -> str:
    """Sign and name of a state, for a grid cell."""
    return f"{looks.get(name, _UNKNOWN_LOOK).sign} {name}"


def number(value: float | None, unit: str = "") -> str:
    """Value with four significant digits and its unit ("1" is not shown); a dash for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    return readable(value, unit or "1").replace(" ", "\N{NO-BREAK SPACE}")


def size(count: float | None) -> str:
    """Bytes in the largest binary unit that gives at least 1; a dash for None and NaN."""
    return "–" if count is None or math.isnan(count) else readable_bytes(count)


def count(n: int, noun: str) -> str:
    """Number and noun: 1 run, 2 runs."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def zone() -> ZoneInfo:
    """The time zone of the reader's browser; UTC where it names none that is known here."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return ZoneInfo("UTC")


def moment(at: object, form: str = "%Y-%m-%d %H:%M:%S %Z") -> str:
    """Time of the reader's clock; a dash if missing."""
    return at.astimezone(zone()).strftime(form) if isinstance(at, datetime) and not pd.isna(at) else "–"


def duration(start: object, end: object = None) -> str:
    """Time between two moments, until now if `end` is missing; a dash without a start."""
    if not isinstance(start, datetime) or pd.isna(start):
        return "–"
    until = end if isinstance(end, datetime) and not pd.isna(end) else datetime.now(UTC)
    return number(round(max(0.0, (until - start).total_seconds()), 1), "s")


def tally(row: Mapping[str, Any]) -> str:
    """Point counts by state, omitting zeros, and how many of them are measured again just now."""
    names = {name: name for name in ("ok", "failed", "answered", "skipped", "cancelled", "running", "pending")}
    names["again"] = "measured again"
    return " · ".join(f"{int(row[name])} {text}" for name, text in names.items() if row[name]) or "no points"


def progress(row: Mapping[str, Any]) -> float:
    """Share of a run's points that ended and are not measured again just now, and of the steps of trainings that are
    under way, 0 to 1."""
    left = row["running"] + row["pending"] + row["again"] - row["under_way"]
    return 1 - left / row["points"] if row["points"] else 0.0


def point_link(point_id: str, label: str | None = None, hover: str = "") -> str:
    """Markdown link to a point's page; relative, so that it also works behind a proxy's prefix.

    Args:
        label: Markdown; the point's number if None.
        hover: text to show under the pointer, with any characters.
    """
    run_id, _, index = point_id.rpartition("/")
    title = re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", plain_text.in_a_line(hover))  # every mark escaped
    title = f' "{title}"' if hover.strip() else ""
    return f"[{label or index}](runs?{urlencode({'run': run_id, 'point': point_id})}{title})"


def evidence(point_ids: Sequence[str]) -> str:
    """Links to the points behind a verdict."""
    links = " ".join(point_link(point_id, f"#{point_id.rpartition('/')[2]}") for point_id in point_ids[:_LINKS])
    more = len(point_ids) - _LINKS
    return f"{links} +{more}" if more > 0 else links or "–"


code, named = plain_text.code, series.named
plain = plain_text.for_page
"""The text on one line, as Markdown that shows it and nothing else; parts between backticks stay code."""


def bound(rule: RuleVerdict) -> str:
    """A rule's bound with its direction; a dash without one."""
    if rule.bound is None:
        return "–"
    comparison = {"<=": "≤", ">=": "≥"}.get(rule.comparison or "", "")
    return f"{comparison}\N{NO-BREAK SPACE}{number(rule.bound, rule.unit)}".strip()


def doing(point: Mapping[str, Any]) -> str:
    """A running point's label, phase and last heartbeat (Markdown)."""
    text = f"**{plain(named(point['label']))}**"
    if phase := phase_in_words(point):
        text += f" · {plain(phase)}"
    if isinstance(point["heartbeat_at"], datetime) and not pd.isna(point["heartbeat_at"]):
        text += f" · last heard of {duration(point['heartbeat_at'])} ago"
    return text


def route(kernels: Mapping[str, str] | None) -> str:
    """Kernels that ran, by branch; a dash if unknown."""
    return ", ".join(f"{branch}: {kernel}" for branch, kernel in (kernels or {}).items()) or "–"
