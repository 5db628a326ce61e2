"""The charts of each kind of run: their queries on both databases, their colours, and that they can be drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import vl_convert
import yaml

import orchestrator
from jobs.schema.states import PointState
from orchestrator.report import charts, series
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


def test_implementations_and_states_look_as_in_every_chart(sqlite_store: Store, sweep):
    sqlite_store.apply_many(sweep("run", failures={PointState.HANG: "silent"}))
    (chart,) = charts.kind_charts(sqlite_store, "run", "scaling")
    (color,) = _found(chart.spec, "color")
    names = ["chunked", "naive"]
    assert color["scale"] == {"domain": names, "range": [series.look(name).color for name in names]}


def _found(part: object, name: str) -> list:
    """The values of a name anywhere in a chart, but for those of its configuration."""
    found = []
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        found += [value] if key == name else [] if key == "config" else _found(value, name)
    return found
