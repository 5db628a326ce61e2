"""Formatting of numbers, times, links and text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pandas as pd
import pytest

from dashboard import parts
from jobs.schema.states import PointState, Result, RunState

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


def test_hover_text_cannot_leave_its_link():
    link = parts.point_link("run-1/7", "✓", hover='a "quote" \\ and\n&lt; (b)')
    assert link == r'[✓](runs?run=run-1&point=run-1%2F7 "a \"quote\" \\ and \&lt\; \(b\)")'
    assert parts.point_link("run-1/7") == "[7](runs?run=run-1&point=run-1%2F7)"
