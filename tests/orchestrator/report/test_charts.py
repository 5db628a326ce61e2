"""The charts: drawn points and lines, omitted failures, rendering."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd
import pytest
import vl_convert

from jobs.schema.quantities import SHARED
from orchestrator.judge.analysis import fits_frame, scaling_fits
from orchestrator.report import charts
from orchestrator.report.scaling_chart import scaling_chart
from orchestrator.report.series import look
from orchestrator.store import Store, queries

NONE = fits_frame([])


@pytest.fixture
def rows(complete: str) -> pd.DataFrame:
    with Store.open(complete, create=False, readonly=True) as store:
        return queries.scaling(store)


def measured(rows: pd.DataFrame) -> Any:  # a frame: Pandas' stubs do not say so
    return rows[(rows["origin"] == "measured") & (rows["pass"] == "forward+backward")]


def fitted(rows: Any) -> Any:
    """The rows' fits with their local slopes, as the pages have them."""
    return fits_frame(scaling_fits(rows))


def scaling(rows: Any, metric: str = "time", fits: Any = NONE) -> alt.LayerChart:
    return scaling_chart(rows, fits, SHARED.of(metric))


def encodings(chart: alt.LayerChart) -> list[dict[str, Any]]:
    return [leaf["encoding"] for leaf in leaves(chart.to_dict())]


def leaves(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [leaf for layer in spec["layer"] for leaf in leaves(layer)] if "layer" in spec else [spec]


def series(chart: alt.LayerChart) -> list[str]:
    """Names in a chart's legend."""
    domains = [encoding.get("color", {}).get("scale", {}).get("domain", []) for encoding in encodings(chart)]
    return list(dict.fromkeys(name for domain in domains for name in domain))


def data(chart: alt.LayerChart, column: str) -> list[dict[str, Any]]:
    """Rows of a chart's data that have the column."""
    return [row for rows in chart.to_dict()["datasets"].values() for row in rows if column in row]


def drawn(chart: alt.LayerChart) -> pd.DataFrame:
    return pd.DataFrame(data(chart, "point_id")).drop_duplicates("point_id")


def svg(chart: alt.LayerChart | alt.Chart) -> str:
    return vl_convert.vegalite_to_svg(chart.to_json())


def test_a_curve_spans_the_lengths_that_it_rests_on_and_other_points_are_paler(rows: pd.DataFrame):
    chosen = measured(rows).query("implementation == 'naive' and metric == 'time'")
    fits = fits_frame([replace(fit, lengths=(2048, 4096)) for fit in scaling_fits(chosen)])
    chart = scaling(chosen, fits=fits)
    assert drawn(chart).set_index("seq_len")["opacity"].to_dict() == {512: 0.35, 1024: 0.35, 2048: 1.0, 4096: 1.0}
    curve = [row["seq_len"] for row in data(chart, "law")]
    assert (min(curve), max(curve)) == pytest.approx((2048, 4096))


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1.7e308])
def test_a_value_that_a_log_axis_cannot_show_is_left_out(rows: pd.DataFrame, value: float):
    chosen = measured(rows)
    chosen.loc[(chosen["metric"] == "time") & (chosen["seq_len"] == 512), ["value", "per_sequence"]] = value
    chosen.loc[chosen["metric"] == "time", "ci_high"] = 1.7e308
    assert set(drawn(scaling(chosen))["seq_len"]) == {1024, 2048, 4096}


@pytest.mark.parametrize("metric", ["time", "throughput"])  # with fits, and without
def test_series_are_named_by_what_distinguishes_them_and_differ_in_their_dashes(rows: pd.DataFrame, metric: str):
    chosen = rows[(rows["origin"] == "measured") & (rows["implementation"] == "chunked")]
    chart = scaling(chosen, metric)
    assert series(chart) == ["chunked · forward", "chunked · forward+backward  – –"]
    lines = [leaf["mark"] for leaf in leaves(chart.to_dict()) if leaf["mark"]["type"] == "line"]
    assert [mark.get("strokeDash") for mark in lines[1:]] == [None, [7, 4]]  # after the guides


def test_reported_points_are_hollow_with_dashed_lines(rows: pd.DataFrame):
    reported = (rows["run_id"].str.startswith("reported-002")) & (rows["implementation"] == "nsa-vibe")
    both = rows[reported & (rows["metric"] == "peak_memory")]
    both = pd.concat([both, measured(rows).query("metric == 'peak_extra_memory'").assign(metric="peak_memory")])
    chart = scaling(both, "peak_memory", fitted(both))
    assert any(name.startswith("nsa-vibe (reported)") for name in series(chart))
    marks = [leaf["mark"] for leaf in leaves(chart.to_dict())]
    assert [mark["filled"] for mark in marks if mark["type"] == "point"] == [True, False]
    assert any(mark["type"] == "line" and mark.get("strokeDash") == [7, 4] for mark in marks)


def looks_in(chart: alt.LayerChart) -> dict[str, tuple[str, str]]:
    """Colour and mark of each implementation in a chart's legend."""
    found = {}
    for encoding in encodings(chart):
        if "shape" in encoding:
            color, mark = encoding["color"]["scale"], encoding["shape"]["scale"]
            found |= dict(zip(color["domain"], zip(color["range"], mark["range"], strict=True), strict=True))
    return {name.split(" ")[0]: looked for name, looked in found.items()}


def test_an_implementation_looks_the_same_in_every_chart(rows: pd.DataFrame):
    chosen = measured(rows).replace({"implementation": {"chunked": "fresh"}})
    fits = fitted(chosen)
    expected = {name: tuple(look(name)) for name in ("fresh", "dense", "naive")}
    for metric in ("time", "peak_extra_memory", "throughput"):
        assert looks_in(scaling(chosen, metric, fits)) == expected
        fewer = chosen.query("implementation == 'fresh'")
        assert looks_in(scaling(fewer, metric, fits)) == {"fresh": expected["fresh"]}
    local = charts.local_chart(fits[fits["metric"] == "time"], SHARED)
    for chart in (charts.exponent_chart(fits, SHARED), local):
        point = next(layer["encoding"] for layer in chart.spec["layer"] if "shape" in layer.get("encoding", {}))
        color, mark = point["color"]["scale"], point["shape"]["scale"]
        looks = zip(color["domain"], zip(color["range"], mark["range"], strict=True), strict=True)
        assert {name.split(" ")[0]: look for name, look in looks} == expected


def test_a_chart_of_more_points_than_fit_says_which_it_leaves_out(rows: pd.DataFrame):
    one = measured(rows).query("implementation == 'naive' and metric == 'time'")
    many = [one.assign(implementation=f"i{n}", point_id=one["point_id"] + f"-{n}") for n in range(61)]
    many[0] = many[0].iloc[:-1]  # fewer lengths than the others
    chart = scaling(pd.concat(many))
    assert chart.to_dict()["title"]["text"] == "drawn: 240 of 243 points, 60 of 61 series"
    assert "i0" not in set(drawn(chart)["implementation"])
    assert "title" not in scaling(one).to_dict()
