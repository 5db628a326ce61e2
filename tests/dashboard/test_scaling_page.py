"""The Scaling page: what it begins with, its controls in the address, filters, failures and branches."""

import sqlite3
from typing import Any

import pandas as pd
import pytest
import streamlit as st
from dashboard_pages import ROOT, asked, chart_titles, check, show, text
from made_up_runs import small_sweep
from streamlit.testing.v1 import AppTest

from jobs.schema.states import PointState, RunState
from orchestrator.store import Store
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, RunRecord, StartRecord

RUN, HALF = "20261121-100000-demo-ab12", "20261121-113000-m7c-cd34"
CURVE = "reported-002_0efc432e4c57f734"


def test_scaling_begins_with_our_latest_sweep_and_the_reported_curve(complete: str):
    app = show("scaling")
    assert app.multiselect[0].value == [RUN, CURVE]
    assert asked(app) == {}  # defaults are left out
    ours = ["Memory, measured", "Time, measured", "Throughput, measured", "Memory, reported"]
    assert [title for title in chart_titles(app) if title in ours] == ours
    assert len(app.get("vega_lite_chart")) == 6
    assert [button.label for button in app.get("download_button")] == ["Rows as CSV"]
    fits = _fits(app)
    ours = fits[fits["Origin"].str.contains("measured")].set_index(["Quantity", "Implementation"])
    assert ours["Exponent"]["Peak memory beyond inputs", "naive"] == pytest.approx(2, abs=0.05)
    assert ours["Exponent"]["Peak memory beyond inputs", "chunked"] == pytest.approx(1, abs=0.05)
    assert ours["Local exponents"]["Time", "naive"].startswith("1K ")
    assert ours["Rests on"]["Time", "naive"] == "4: 512 to 4K"
    assert fits["Growth"].str.contains(" to ").all()
    assert fits["Origin"].str.contains("reported").any()


@pytest.mark.parametrize(
    ("lengths", "state", "kind", "opens"),
    [
        ((512, 1024), RunState.DONE, "scaling", False),  # a smoke test of two lengths
        ((512, 1024, 2048, 4096, 8192), RunState.CANCELLED, "scaling", False),
        ((512, 1024, 2048, 4096, 8192), None, "scaling", False),  # still running
        ((512, 1024, 2048, 4096, 8192), RunState.DONE, "decode", True),  # the complete sweep has only four lengths
        ((512, 1024, 2048, 4096), RunState.DONE, "scaling", True),
    ],
)
def test_scaling_begins_with_the_newest_complete_sweep(
    complete: str, lengths: tuple[int, ...], state: RunState | None, kind: str, opens: bool
):
    with Store.open(complete) as store:
        store.apply_many(small_sweep(HALF, lengths, state, kind))
    assert show("scaling").multiselect[0].value[0] == (HALF if opens else RUN)


def test_unknown_values_are_removed_from_the_address_with_a_word(complete: str):
    app = check(_visit("scaling", {"run": [RUN, "gone"], "pass": ["sideways"], "reported": ["x"]}))
    assert app.multiselect[0].value == [RUN]
    told = [each.value for each in app.toast]
    assert told == [f"Unknown in the address, ignored: `{each}`" for each in ("run=gone", "pass=sideways")]
    assert asked(app)["run"] == [RUN]
    assert "Time, measured" in chart_titles(app)


def test_scaling_shows_the_share_of_each_branch_and_where_the_compressed_takes_over(complete: str):
    with sqlite3.connect(complete.removeprefix("sqlite:///")) as connection:
        connection.executemany(
            "INSERT INTO metric (point_id, attempt, state, name, unit, value, samples, method) "
            "SELECT id, attempt.number, state, ?, 'ms', ? * pow(seq_len / 1024.0, ?), '[]', 'profiler' "
            "FROM point JOIN attempt ON point_id = id "
            "WHERE run_id = ? AND implementation = 'chunked' AND state = 'ok'",
            [("stage_compressed", 1.0, 2, RUN), ("stage_window", 2.0, 1, RUN), ("stage_merge", 0.5, 1, RUN)],
        )
    app = show("scaling")
    said = text(app)
    assert "Share of each branch" in said
    assert "The compressed branch grows as S^2.00" in said
    assert "costs as much as all the rest from" in said
    assert said.count("The compressed branch grows") == 1  # forward+backward, as the other charts show by default
    _pills(app, "Implementation").set_value(["naive"]).run()
    assert "Share of each branch" not in text(check(app))


def _fits(app: AppTest) -> pd.DataFrame:
    return next(grid.value for grid in app.dataframe if "Exponent" in grid.value.columns)


def _pills(app: AppTest, label: str) -> Any:
    return next(control for control in app.pills if control.label == label)


def _visit(page: str, query: dict[str, list[str]]) -> AppTest:
    """The page at an address."""
    app = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=60)
    app.switch_page(f"{page}.py")
    for name, values in query.items():
        app.query_params[name] = values
    return app.run()


def test_scaling_lists_failures_by_state_and_draws_none(complete: str):
    app = show("scaling")
    missing = next(grid.value for grid in app.dataframe if "Why" in grid.value.columns)
    states = "".join(missing["State"])
    assert all(state in states for state in ("oom", "hang", "error", "skipped"))
    assert missing["Why"].str.contains("93.1 GiB").any()
    numbers = next(frame.value for frame in app.dataframe if "per_sequence" in frame.value or "value" in frame.value)
    assert 65536 not in set(numbers["seq_len"])


def test_scaling_shows_the_run_that_a_link_names(complete: str):
    app = show("scaling", run="reported-peers-H200")
    assert app.multiselect[0].value == ["reported-peers-H200"]
    assert "Time, reported" in chart_titles(app)
    shapes = _pills(app, "Shape")
    assert shapes.value == ["12/2 d64"]  # one of three, which would hide each other
    shown = len(_fits(app))
    shapes.set_value(["12/2 d64", "64/4 d128"]).run()
    assert len(_fits(check(app))) > shown


def test_without_a_number_against_a_length_scaling_says_so(database: str):
    """A drill's points end ok, but have nothing to draw: it is no matter of waiting, or of filters."""
    run, point = "20261121-120000-drill-aa11", "20261121-120000-drill-aa11/0"
    metrics = (MetricData(name="elapsed", unit="s", value=8.0),)
    with Store.open(database) as store:
        store.apply_many([RunRecord(run_id=run, name="drill", kind="drill", spec={}, spec_hash="5")])
        store.apply_many([PointRecord(run_id=run, point_id=point, index=0, key="0", label="slow", config={}, axes={})])
        assert "No finished point fits this choice yet." in text(show("scaling", run=run))
        store.apply_many([StartRecord(run_id=run, point_id=point, attempt=1)])
        store.apply_many([OutcomeRecord(run_id=run, point_id=point, attempt=1, state=PointState.OK, metrics=metrics)])
    st.cache_data.clear()
    said = text(show("scaling", run=run))
    assert "no numbers against a sequence length" in said
    assert "No finished point" not in said
