"""The charts: drawn points and lines, omitted failures, rendering."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd
import pytest
import vl_convert

from jobs.schema.quantities import AGAINST_LENGTH, SHARED, THROUGHPUT, Plot
from orchestrator.judge.analysis import Fit, fits_frame, scaling_fits
from orchestrator.report import charts, exponents
from orchestrator.report.samples import samples_chart
from orchestrator.report.series import look
from orchestrator.store import Store, queries


@pytest.fixture
def rows(complete: str) -> pd.DataFrame:
    with Store.open(complete, create=False, readonly=True) as store:
        return queries.scaling(store)


def measured(rows: pd.DataFrame, pass_: str = "forward+backward") -> pd.DataFrame:
    return rows[(rows["origin"] == "measured") & (rows["pass"] == pass_)]


def series(chart: alt.LayerChart) -> list[str]:
    """Names in a chart's legend."""
    found: list[str] = []
    for layer in _encodings(chart.to_dict()):
        found += layer.get("color", {}).get("scale", {}).get("domain", [])
    return list(dict.fromkeys(found))


def _encodings(spec: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [encoding for layer in spec.get("layer", []) for encoding in _encodings(layer)]
    return [*inner, *([spec["encoding"]] if "encoding" in spec else [])]


def drawn(chart: alt.LayerChart) -> pd.DataFrame:
    """Data of a chart that belong to points."""
    sets = chart.to_dict()["datasets"].values()
    return pd.DataFrame([row for rows in sets for row in rows if "point_id" in row]).drop_duplicates("point_id")


def test_fitted_exponents_are_in_the_legend(rows: pd.DataFrame):
    chosen = measured(rows)
    names = series(charts.scaling_chart(chosen, scaling_fits(chosen), SHARED.of("peak_extra_memory")))
    assert [name.split(" ")[0] for name in names] == ["chunked", "dense", "naive"]
    found = {name.split(" ")[0]: float(name.split("^")[1].split(" ")[0]) for name in names}
    assert found["chunked"] == pytest.approx(1, abs=0.05)
    assert found["naive"] == pytest.approx(2, abs=0.05)


def test_a_law_in_the_legend_has_its_interval_and_its_lengths(rows: pd.DataFrame):
    chosen = measured(rows).query("implementation == 'naive'")
    fits = scaling_fits(chosen)
    law = next(fit for fit in fits if fit.metric == "time")
    [name] = series(charts.scaling_chart(chosen, fits, SHARED.of("time")))
    assert name == f"naive  ~ S^{law.exponent:.2f} ({law.ci_low:.2f} to {law.ci_high:.2f}), 512–4K"


def test_a_curve_spans_the_lengths_that_it_rests_on_and_other_points_are_paler(rows: pd.DataFrame):
    chosen = measured(rows).query("implementation == 'naive' and metric == 'time'")
    fits = [replace(fit, lengths=(2048, 4096)) for fit in scaling_fits(chosen)]
    chart = charts.scaling_chart(chosen, fits, SHARED.of("time"))
    assert drawn(chart).set_index("seq_len")["opacity"].to_dict() == {512: 0.35, 1024: 0.35, 2048: 1.0, 4096: 1.0}
    curve = [row["seq_len"] for data in chart.to_dict()["datasets"].values() for row in data if "law" in row]
    assert (min(curve), max(curve)) == pytest.approx((2048, 4096))


def test_fits_may_come_as_objects_or_as_a_frame(rows: pd.DataFrame):
    chosen = measured(rows)
    fits = scaling_fits(chosen)
    from_objects = charts.scaling_chart(chosen, fits, SHARED.of("time")).to_dict()
    assert from_objects["layer"] == charts.scaling_chart(chosen, fits_frame(fits), SHARED.of("time")).to_dict()["layer"]


def test_only_the_metric_asked_for_is_drawn(rows: pd.DataFrame):
    chosen = measured(rows)
    points = drawn(charts.scaling_chart(chosen, [], SHARED.of("throughput")))
    assert len(points) == 12
    assert set(points["metric"]) == {"throughput"}


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1.7e308])
def test_a_value_that_a_log_axis_cannot_show_is_left_out(rows: pd.DataFrame, value: float):
    chosen = measured(rows)
    chosen.loc[(chosen["metric"] == "time") & (chosen["seq_len"] == 512), ["value", "per_sequence"]] = value
    chosen.loc[chosen["metric"] == "time", "ci_high"] = 1.7e308
    assert set(drawn(charts.scaling_chart(chosen, [], SHARED.of("time")))["seq_len"]) == {1024, 2048, 4096}


def test_series_are_named_by_their_distinguishing_coordinates(rows: pd.DataFrame):
    chosen = rows[(rows["origin"] == "measured") & (rows["implementation"] == "chunked")]
    assert series(charts.scaling_chart(chosen, [], SHARED.of("time"))) == [
        "chunked · forward",
        "chunked · forward+backward  – –",
    ]


def test_series_of_one_look_have_dashes_of_their_own_also_without_a_fit(rows: pd.DataFrame):
    chosen = rows[(rows["origin"] == "measured") & (rows["implementation"] == "chunked")]
    chart = charts.scaling_chart(chosen, [], SHARED.of("throughput"))
    assert series(chart) == ["chunked · forward", "chunked · forward+backward  – –"]
    lines = [leaf["mark"] for leaf in _leaves(chart.to_dict()) if leaf["mark"]["type"] == "line"]
    assert [mark.get("strokeDash") for mark in lines[1:]] == [None, [7, 4]]  # after the guides


def test_reported_points_are_hollow_with_dashed_lines(rows: pd.DataFrame):
    reported = (rows["run_id"].str.startswith("reported-002")) & (rows["implementation"] == "nsa-vibe")
    both = rows[reported & (rows["metric"] == "peak_memory")]
    both = pd.concat([both, measured(rows).query("metric == 'peak_extra_memory'").assign(metric="peak_memory")])
    chart = charts.scaling_chart(both, scaling_fits(both), SHARED.of("peak_memory"))
    assert any(name.startswith("nsa-vibe (reported)") for name in series(chart))
    marks = [layer["mark"] for layer in _leaves(chart.to_dict())]
    assert [mark["filled"] for mark in marks if mark["type"] == "point"] == [True, False]
    assert any(mark["type"] == "line" and mark.get("strokeDash") == [7, 4] for mark in marks)


def _leaves(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [leaf for layer in spec["layer"] for leaf in _leaves(layer)] if "layer" in spec else [spec]


def test_intervals_follow_the_values_when_shown_per_sequence(rows: pd.DataFrame):
    chosen = measured(rows).query("metric == 'time' and implementation == 'dense'").copy()
    whole = drawn(charts.scaling_chart(chosen, [], SHARED.of("time")))
    chosen["batch"], chosen["per_sequence"] = 2, chosen["value"] / 2
    halved = drawn(charts.scaling_chart(chosen, [], SHARED.of("time")))
    assert (halved["high"] * 2).tolist() == pytest.approx(whole["high"].tolist())


def test_throughput_is_of_the_whole_batch(rows: pd.DataFrame):
    chosen = measured(rows).copy()
    chosen["batch"] = 2
    chosen.loc[chosen["metric"] == "time", "per_sequence"] /= 2  # as in the views; rates are not divided
    titles = {
        metric: {
            encoding["y"].get("title")
            for encoding in _encodings(charts.scaling_chart(chosen, [], SHARED.of(metric)).to_dict())
        }
        for metric in ("time", "throughput")
    }
    assert titles == {"time": {"Time per sequence [s, ms, µs]"}, "throughput": {"Throughput [tok/s]"}}


@pytest.mark.parametrize(("plot", "guides"), [(Plot.RATE, {"linear", "S²"}), (Plot.STEP_RATE, {"constant", "~ 1/S"})])
def test_a_steps_throughput_has_separate_guides(rows: pd.DataFrame, plot: Plot, guides: set[str]):
    """A constant rate means linear time for a pass over S tokens, but constant time for a step of one token."""
    chart = charts.scaling_chart(measured(rows), [], replace(THROUGHPUT, plot=plot)).to_dict()
    assert {row["guide"] for data in chart["datasets"].values() for row in data if "guide" in row} == guides


@pytest.mark.parametrize("metric", SHARED.names(plots=AGAINST_LENGTH))
def test_charts_render(rows: pd.DataFrame, metric: str):
    chosen = rows.assign(metric=metric, unit=SHARED.of(metric).unit)
    chart = charts.scaling_chart(
        chosen[chosen["origin"] == "measured"].drop_duplicates("point_id"), [], SHARED.of(metric)
    )
    svg = vl_convert.vegalite_to_svg(chart.to_json())
    assert "4K" in svg
    assert "sequence length S" in svg


def test_the_exponent_chart_renders(rows: pd.DataFrame):
    svg = vl_convert.vegalite_to_svg(exponents.exponent_chart(scaling_fits(measured(rows)), SHARED).to_json())
    assert "linear" in svg
    assert "chunked · time" in svg


def test_the_samples_chart_renders():
    assert "sample" in vl_convert.vegalite_to_svg(samples_chart([3.0, 3.1, 2.9], "ms").to_json())


def test_nothing_to_draw_is_an_error(rows: pd.DataFrame):
    with pytest.raises(ValueError, match="no rows"):
        charts.scaling_chart(rows[:0], [], SHARED.of("time"))
    with pytest.raises(ValueError, match="none to draw"):
        exponents.exponent_chart([], SHARED)


@pytest.mark.parametrize(
    ("length", "label"), [(128, "128"), (512, "512"), (1024, "1K"), (1536, "1.5K"), (65536, "64K"), (1000, "1,000")]
)
def test_lengths_are_shortened(length: int, label: str):
    assert charts.length_label(length) == label


def looks_in(chart: alt.LayerChart) -> dict[str, tuple[str, str]]:
    """Colour and mark of each implementation in a chart's legend."""
    found = {}
    for encoding in _encodings(chart.to_dict()):
        if "shape" in encoding:
            color, mark = encoding["color"]["scale"], encoding["shape"]["scale"]
            found |= dict(zip(color["domain"], zip(color["range"], mark["range"], strict=True), strict=True))
    return {name.split(" ")[0]: looked for name, looked in found.items()}


def test_an_implementation_looks_the_same_in_every_chart(rows: pd.DataFrame):
    chosen = measured(rows).replace({"implementation": {"chunked": "fresh"}})
    fits = scaling_fits(chosen)
    expected = {name: tuple(look(name)) for name in ("fresh", "dense", "naive")}
    for metric in ("time", "peak_extra_memory", "throughput"):
        assert looks_in(charts.scaling_chart(chosen, fits, SHARED.of(metric))) == expected
        fewer = chosen.query("implementation == 'fresh'")
        assert looks_in(charts.scaling_chart(fewer, fits, SHARED.of(metric))) == {"fresh": expected["fresh"]}
    for chart in (exponents.exponent_chart(fits, SHARED), exponents.local_chart(local(fits), SHARED)):
        data = [row for rows in chart.to_dict()["datasets"].values() for row in rows if "series" in row]
        assert {row["series"].split(" ")[0]: (row["color"], row["mark"]) for row in data} == expected


def test_a_chart_of_more_points_than_fit_says_which_it_leaves_out(rows: pd.DataFrame):
    one = measured(rows).query("implementation == 'naive' and metric == 'time'")
    many = [one.assign(implementation=f"i{n}", point_id=one["point_id"] + f"-{n}") for n in range(1501)]
    many[0] = many[0].iloc[:-1]  # fewer lengths than the others
    chart = charts.scaling_chart(pd.concat(many), [], SHARED.of("time"))
    assert chart.to_dict()["title"]["text"] == "drawn: 240 of 6,003 points, 60 of 1,501 series"
    assert "i0" not in set(drawn(chart)["implementation"])
    assert "title" not in charts.scaling_chart(one, [], SHARED.of("time")).to_dict()


def test_a_legend_below_a_chart_names_its_series_with_their_looks(rows: pd.DataFrame):
    chosen = measured(rows)
    fits = scaling_fits(chosen)
    with_legend = charts.scaling_chart(chosen, fits, SHARED.of("time"))
    without = charts.scaling_chart(chosen, fits, SHARED.of("time"), legend=False)
    entries = charts.scaling_legend(chosen, fits, SHARED.of("time"))
    assert [name for name, _ in entries] == series(with_legend) == series(without)
    assert {name.split(" ")[0]: tuple(look) for name, look in entries} == looks_in(without)
    assert all(encoding["color"]["legend"] is None for encoding in _encodings(without.to_dict()) if "shape" in encoding)


def test_no_name_in_a_legend_is_cut(rows: pd.DataFrame):
    name = "Scalable-Flash-NSA, window by flash-attn-4 in an environment of its own, with a suffix"
    chosen = measured(rows).replace({"implementation": {"naive": name}})
    chart = charts.scaling_chart(chosen, scaling_fits(chosen), SHARED.of("time"))
    assert name in vl_convert.vegalite_to_svg(chart.to_json())


def test_local_exponents_of_one_look_differ_by_the_dashes_in_their_legend(rows: pd.DataFrame):
    fits = scaling_fits(rows[(rows["origin"] == "measured") & (rows["metric"] == "time")])
    entries = exponents.local_legend(local(fits), SHARED)
    assert len({name for name, _ in entries}) == len(entries) > 3
    assert any(name.endswith("– –") for name, _ in entries)


def test_long_names_beside_exponents_take_two_lines(rows: pd.DataFrame):
    chosen = measured(rows)
    short = exponents.exponent_chart(scaling_fits(chosen), SHARED)
    renamed = chosen.replace({"implementation": {"naive": "native-sparse-attention-triton-of-somebody"}})
    long = exponents.exponent_chart(scaling_fits(renamed), SHARED)
    for chart, lines in ((short, False), (long, True)):
        axes = [encoding.get("y", {}).get("axis") or {} for encoding in _encodings(chart.to_dict())]
        assert any("labelExpr" in axis for axis in axes) is lines
        assert "naive" in (svg := vl_convert.vegalite_to_svg(chart.to_json())) or "somebody" in svg


def local(fits: list[Fit], metric: str = "time") -> pd.DataFrame:
    """Fits of a metric with their local slopes, as the pages have them."""
    own = [fit for fit in fits if fit.metric == metric]
    return fits_frame(own).assign(local=[fit.local for fit in own])


def test_the_local_exponents_are_drawn_between_their_lengths(rows: pd.DataFrame):
    fits = scaling_fits(measured(rows))
    chart = exponents.local_chart(local(fits), SHARED)
    svg = vl_convert.vegalite_to_svg(chart.to_json())
    assert "local exponent of time" in svg
    points = [row for rows in chart.to_dict()["datasets"].values() for row in rows if "range" in row]
    naive = {row["range"]: row["exponent"] for row in points if row["series"].startswith("naive")}
    assert set(naive) == {"512 to 1K", "1K to 2K", "2K to 4K"}
    assert naive["2K to 4K"] == pytest.approx(2, abs=0.1)
    with pytest.raises(ValueError, match="none to draw"):
        exponents.local_chart(local([]), SHARED)


@pytest.mark.parametrize("more", [-3.0, 0.0, 3.0])
def test_no_local_exponent_is_on_the_edge_where_its_mark_would_be_cut(rows: pd.DataFrame, more: float):
    frame = local(scaling_fits(measured(rows)))
    moved = [[replace(slope, exponent=slope.exponent + more) for slope in slopes] for slopes in frame["local"]]
    chart = exponents.local_chart(frame.assign(local=moved), SHARED).to_dict()
    low, high = next(layer["y"]["scale"]["domain"] for layer in _encodings(chart) if "y" in layer)
    shown = [row["exponent"] for rows in chart["datasets"].values() for row in rows if "range" in row]
    assert low + 0.1 < min(shown)
    assert max(shown) < high - 0.1
