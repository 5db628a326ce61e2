"""The charts of each kind of run: their queries on both databases, what is drawn, omitted failures, rendering."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import vl_convert
import yaml

import orchestrator
from jobs.schema.quantities import SHARED
from orchestrator.judge.analysis import fits_frame, scaling_fits
from orchestrator.report import charts
from orchestrator.report.series import LOOKS, OTHER_COLORS, look
from orchestrator.store import Store, queries
from orchestrator.store.importer import import_file

REPORT = Path(orchestrator.__file__).parent / "report"
JOURNALS = Path(orchestrator.__file__).parent / "reference_data" / "journals"
KINDS = list(yaml.safe_load((REPORT / "charts.yaml").read_text())["kinds"])
NEWEST = {path.name.split("-", 2)[2].split("-")[0]: path for path in sorted(JOURNALS.glob("*.gz"))}


@pytest.mark.parametrize("kind", KINDS)
def test_the_queries_of_a_kind_are_those_of_the_database(store: Store, kind: str):
    assert charts.kind_charts(store, "none", kind) == []


@pytest.mark.parametrize("new_database", ["postgres"], indirect=True)  # whose types and times are the less lenient
@pytest.mark.parametrize("kind", sorted(NEWEST.keys() & set(KINDS)))
def test_a_run_of_a_kind_is_drawn(store: Store, kind: str):
    import_file(store, NEWEST[kind])
    drawn = charts.kind_charts(store, NEWEST[kind].name.removesuffix(".jsonl.gz"), kind)
    assert drawn
    for chart in drawn:
        assert chart.title in vl_convert.vegalite_to_svg(chart.whole)
        tooltips = [len(found) for found in _found(chart.spec, "tooltip")]
        assert all(number <= 6 for number in tooltips)
        assert all(row["at"].endswith("+00:00") for row in chart.rows if "at" in row)


def test_of_many_rows_long_series_are_thinned_and_short_ones_are_whole(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
):
    import_file(sqlite_store, NEWEST["train"])
    run_id = NEWEST["train"].name.removesuffix(".jsonl.gz")
    whole = charts.kind_charts(sqlite_store, run_id, "train")[0].rows
    monkeypatch.setattr(charts, "_MOST_ROWS", 20)
    thinned = charts.kind_charts(sqlite_store, run_id, "train")[0].rows
    assert len(thinned) <= 20 < len(whole)
    lasts = [{row["text"]: row for row in rows} for rows in (thinned, whole)]
    assert lasts[0] == lasts[1], "each line ends where it ended"
    held_out = [row for row in whole if row["text"] == "held out"]
    assert held_out
    assert [row for row in thinned if row["text"] == "held out"] == held_out


def test_predicted_memory_is_drawn_against_the_measured(store: Store):
    import_file(store, NEWEST["estimate"])
    run_id = NEWEST["estimate"].name.removesuffix(".jsonl.gz")
    points = queries.points(store, run_id)["point_id"].tolist()
    peaks = [mib / 1024 for samples in queries.samples(store, "peak_memory", points).values() for mib in samples]
    rows = charts.kind_charts(store, run_id, "estimate")[0].rows
    assert [row["measured"] for row in rows] == pytest.approx(sorted(peaks))
    assert all(row["predicted"] / row["measured"] == pytest.approx(1 + row["error"] / 100) for row in rows)


def _found(part: object, name: str) -> list:
    """The values of a name anywhere in a chart, but for those of its configuration."""
    found = []
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        found += [value] if key == name else [] if key == "config" else _found(value, name)
    return found


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


def scaling(rows: Any, metric: str = "time", fits: Any = NONE) -> charts.Chart:
    return charts.scaling_chart(rows, fits, SHARED.of(metric))


def series(chart: charts.Chart) -> list[str]:
    """Names in a chart's legend."""
    line = next(layer for layer in chart.spec["layer"] if layer["mark"] == "line")
    return line["encoding"]["color"]["scale"]["domain"]


def lines(chart: charts.Chart) -> pd.DataFrame:
    """The rows of a chart's lines."""
    return pd.DataFrame(next(layer["data"]["values"] for layer in chart.spec["layer"] if layer["mark"] == "line"))


def test_a_curve_spans_the_lengths_that_it_rests_on_and_other_points_are_paler(rows: pd.DataFrame):
    chosen = measured(rows).query("implementation == 'naive' and metric == 'time'")
    fits = fits_frame([replace(fit, lengths=(2048, 4096)) for fit in scaling_fits(chosen)])
    chart = scaling(chosen, fits=fits)
    opacities = {row["seq_len"]: row["opacity"] for row in chart.rows}
    assert opacities == {512: 0.35, 1024: 0.35, 2048: 1.0, 4096: 1.0}
    curve = lines(chart).query("line == 'law'")["seq_len"]
    assert (min(curve), max(curve)) == pytest.approx((2048, 4096))


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1.7e308])
def test_a_value_that_a_log_axis_cannot_show_is_left_out(rows: pd.DataFrame, value: float):
    chosen = measured(rows)
    chosen.loc[(chosen["metric"] == "time") & (chosen["seq_len"] == 512), ["value", "per_sequence"]] = value
    chosen.loc[chosen["metric"] == "time", "ci_high"] = 1.7e308
    assert {row["seq_len"] for row in scaling(chosen).rows} == {1024, 2048, 4096}


@pytest.mark.parametrize("metric", ["time", "throughput"])  # with fits, and without
def test_series_are_named_by_what_distinguishes_them_and_differ_in_their_dashes(rows: pd.DataFrame, metric: str):
    chosen = rows[(rows["origin"] == "measured") & (rows["implementation"] == "chunked")]
    chart = scaling(chosen, metric)
    assert series(chart) == ["chunked · forward", "chunked · forward+backward  – –"]
    dashes = lines(chart).drop_duplicates("series").set_index("series")["dash"].to_dict()
    assert dashes == dict(zip(series(chart), ([1, 0], [7, 4]), strict=True))


def test_reported_points_are_hollow_with_dashed_lines(rows: pd.DataFrame):
    reported = (rows["run_id"].str.startswith("reported-002")) & (rows["implementation"] == "nsa-vibe")
    both = rows[reported & (rows["metric"] == "peak_memory")]
    both = pd.concat([both, measured(rows).query("metric == 'peak_extra_memory'").assign(metric="peak_memory")])
    chart = scaling(both, "peak_memory", fitted(both))
    assert any(name.startswith("nsa-vibe (reported)") for name in series(chart))
    points = [layer for layer in chart.spec["layer"] if "transform" in layer]
    filters = {layer["transform"][0]["filter"]: layer["mark"]["filled"] for layer in points}
    assert filters == {"datum.origin != 'reported'": True, "datum.origin == 'reported'": False}
    assert {row["origin"] for row in chart.rows} == {"measured", "reported"}
    vibe = lines(chart)["series"].str.startswith("nsa-vibe (reported)")
    assert [7, 4] in lines(chart).loc[vibe, "dash"].tolist()
    assert vl_convert.vegalite_to_svg(chart.whole)


def test_a_variant_looks_like_the_longest_name_that_it_begins_with():
    assert look("dense, flash-attn-4 4.0.0b36") == LOOKS["dense, flash-attn-4"]
    assert look("nsa-vibe (cmp)") == LOOKS["nsa-vibe"]
    assert look("dense-other").color in OTHER_COLORS


def looks_in(chart: charts.Chart) -> dict[str, tuple[str, str]]:
    """Colour and mark of each implementation in a chart's legend."""
    point = next(layer["encoding"] for layer in chart.spec["layer"] if "shape" in layer.get("encoding", {}))
    color, mark = point["color"]["scale"], point["shape"]["scale"]
    looks = zip(color["domain"], zip(color["range"], mark["range"], strict=True), strict=True)
    return {name.split(" ")[0]: looked for name, looked in looks}


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
        assert looks_in(chart) == expected


def test_a_chart_of_more_points_than_fit_says_which_it_leaves_out(rows: pd.DataFrame):
    one = measured(rows).query("implementation == 'naive' and metric == 'time'")
    many = [one.assign(implementation=f"i{n}", point_id=one["point_id"] + f"-{n}") for n in range(61)]
    many[0] = many[0].iloc[:-1]  # fewer lengths than the others
    chart = scaling(pd.concat(many))
    assert chart.spec["title"]["text"] == "drawn: 240 of 243 points, 60 of 61 series"
    assert "i0" not in {row["implementation"] for row in chart.rows}
    assert scaling(one).spec["title"] is None
