"""An export as JSON asks the database as often for many points as for few, and gives what is stored of each."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from statements import counted

from jobs.schema.states import PointState
from orchestrator.store import Store, exporter, queries
from orchestrator.store.records import PointRecord, Record, RunRecord, SeriesRecord

RUN = "20261120-120000-demo-abcd"
T0 = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_more_points_need_no_more_statements(store: Store, sweep):
    store.apply_many([*sweep("few", lengths=(512,)), *sweep("many", lengths=tuple(range(512, 532)))])
    asked = []
    for run_id, points in (("few", 2), ("many", 40)):
        with counted(store.engine) as statements:
            [run] = json.loads(exporter.to_json(store, [run_id]))
        assert len(run["points"]) == points
        asked.append(len(statements))
    assert asked[0] == asked[1]


def test_each_point_has_what_is_stored_of_it(store: Store, sweep):
    store.apply_many([*sweep(failures={PointState.HANG: "silent"}), *samples(), *sweep("another")])
    store.apply_many([RunRecord(run_id="empty", name="e", kind="scaling", spec={}, spec_hash="5"), numbered(7)])
    run, empty = json.loads(exporter.to_json(store, [RUN, "empty"]))
    assert [point["number"] for point in run["points"]] == list(range(9))
    assert [point["number"] for point in empty["points"]] == [7]
    for point in (*run["points"], *empty["points"]):
        point_id = point["point_id"]
        stored = queries.point(store, point_id) or {}
        assert list(point) == [*stored, "metrics", "series"]
        assert point["config"] == stored["config"]
        metrics = queries.metrics(store, point_id)
        assert [row["name"] for row in point["metrics"]] == metrics["name"].tolist()
        assert [row["samples"] for row in point["metrics"]] == metrics["samples"].tolist()
        told = [value for series in point["series"] for value in series["values"]]
        assert told == queries.series(store, point_id)["value"].tolist()
    assert [len(point["metrics"]) for point in run["points"]] == [4] * 8 + [0]
    assert [
        [(each["attempt"], each["name"], each["rank"], each["steps"]) for each in p["series"]] for p in run["points"]
    ] == [
        [(1, "loss", 0, [0, 1, 2]), (1, "loss", 1, [0, 1]), (2, "loss", 0, [0])],
        *([[]] * 7),
        [(1, "loss", 0, [0])],
    ]


def samples() -> list[Record]:
    """Series of the first and the last point of the sweep, in no order."""
    return [piece(0, 1, attempt=2), piece(8, 1), piece(0, 3), piece(0, 2, rank=1)]


def piece(number: int, length: int, **more: int) -> SeriesRecord:
    times = tuple((T0 + timedelta(seconds=step)).timestamp() for step in range(length))
    values = tuple(1.0 / (1 + number + step) for step in range(length))
    fields = {"attempt": 1, "rank": 0, "steps": tuple(range(length)), "times": times, "values": values} | more
    return SeriesRecord.model_validate(
        {"run_id": RUN, "point_id": f"{RUN}/{number}", "name": "loss", "unit": "nat/byte", **fields}
    )


def numbered(number: int) -> PointRecord:
    return PointRecord(
        run_id="empty", point_id=f"empty/{number}", index=number, key="k", label="l", config={}, axes={"seq_len": 64}
    )
