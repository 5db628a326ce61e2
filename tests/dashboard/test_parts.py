"""Formatting of numbers, times, links and text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest

from dashboard import grids, parts
from jobs.schema.states import Origin, PointState, Result, RunState

NBSP = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3.14159, "ms", f"3.142{NBSP}ms"),
        (123456.7, "tok/s", f"123,457{NBSP}tok/s"),
        (1e-7, "1", "1e-07"),
        (-0.0, "points", f"0{NBSP}points"),
        (None, "ms", "–"),
        (float("nan"), "ms", "–"),
    ],
)
def test_numbers(value: float | None, unit: str, text: str):
    assert parts.number(value, unit) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (122880.0, "MiB", f"120{NBSP}GiB"),
        (-13625.0, "MiB", f"-13.31{NBSP}GiB"),
        (1023.0, "MiB", f"1,023{NBSP}MiB"),
        (2370.37, "tok/s", f"2,370{NBSP}tok/s"),
        (None, "MiB", "–"),
    ],
)
def test_amounts(value: float | None, unit: str, text: str):
    assert parts.amount(value, unit) == text


@pytest.mark.parametrize(
    ("length", "text"), [(0.2, "1 min"), (12.4, "12 min"), (59.7, "1 h 00 min"), (95, "1 h 35 min")]
)
def test_predicted_minutes(length: float, text: str):
    assert parts.minutes(length) == text


def test_every_state_has_a_look():
    for looks, states in ((parts.POINT_STATES, PointState), (parts.RUN_STATES, RunState), (parts.RESULTS, Result)):
        assert set(looks) == set(states)


def test_durations_and_moments():
    start = datetime(2026, 11, 21, tzinfo=UTC)
    assert parts.duration(start, start + timedelta(seconds=75)) == "1 min 15 s"
    assert parts.duration(start, start + timedelta(hours=2, minutes=5)) == "2 h 05 min"
    assert parts.duration(pd.NaT, start) == "–"
    assert parts.moment(pd.NaT) == "–"
    assert parts.ago(datetime.now(UTC) - timedelta(minutes=5)) == "5 minutes ago"


def test_sizes():
    assert parts.size(93.1 * 2**30) == "93.1 GiB"
    assert parts.size(512) == "512 bytes"
    assert parts.size(float("nan")) == "–"


def test_evidence_links_to_points():
    text = parts.evidence([f"run-1/{n}" for n in range(8)])
    assert text.startswith("[#0](runs?run=run-1&point=run-1%2F0) [#1]")
    assert text.endswith("+2")


def test_hover_text_cannot_leave_its_link():
    link = parts.point_link("run-1/7", "✓", hover='a "quote" \\ and\n&lt; (b)')
    assert link == r'[✓](runs?run=run-1&point=run-1%2F7 "a \"quote\" \\ and \&lt\; \(b\)")'
    assert parts.point_link("run-1/7") == "[7](runs?run=run-1&point=run-1%2F7)"


@pytest.mark.parametrize(
    ("origin", "resumed", "text"),
    [
        (Origin.MEASURED, 0, "2 min 00 s"),
        (Origin.MEASURED, 1, "2 min 00 s, resumed"),
        (Origin.REPORTED, 0, "–"),
    ],
)
def test_how_long_a_run_took(origin: Origin, resumed: int, text: str):
    start = datetime(2026, 11, 20, 12, tzinfo=UTC)
    run = {"origin": origin, "created_at": start, "ended_at": start + timedelta(minutes=2), "resumed": resumed}
    assert grids.took(run) == text
