"""The table of live series: idempotent, of any attempt, read back whole or thinned."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text

from jobs.schema.states import PointState
from orchestrator.store import Store, exporter, queries
from orchestrator.store.records import Record, SeriesRecord

RUN = "20261120-120000-demo-abcd"
T0 = datetime(2026, 11, 20, 12, tzinfo=UTC)
FAILED = f"{RUN}/8"


def piece(first: int, count: int, **changes: Any) -> SeriesRecord:
    steps = tuple(range(first, first + count))
    told: dict[str, Any] = {
        "run_id": RUN, "at": T0, "point_id": FAILED, "attempt": 1, "rank": 0, "name": "loss", "unit": "nat/byte",
        "steps": steps, "times": tuple(T0.timestamp() + 0.125 * step for step in steps),
        "values": tuple(2.0 / (1 + step) for step in steps),
    }  # fmt: skip
    return SeriesRecord.model_validate(told | changes)


def rows(store: Store) -> list[tuple]:
    with store.session() as session:
        query = "SELECT point_id, attempt, latest, series, unit, rank, step, value FROM v_series ORDER BY 1, 2, 4, 6, 7"
        return [tuple(row) for row in session.execute(text(query))]


@pytest.fixture
def failed(store: Store, sweep) -> Store:
    store.apply_many(sweep(RUN, failures={PointState.HANG: "silent"}))
    return store


def test_a_replay_adds_nothing_and_a_failed_point_keeps_its_series(failed: Store) -> None:
    pieces: list[Record] = [piece(0, 3), piece(3, 2), piece(0, 2, rank=1)]
    failed.apply_many(pieces)
    once = rows(failed)
    assert [row[3:] for row in once] == [
        *[("loss", "nat/byte", 0, step, 2.0 / (1 + step)) for step in range(5)],
        *[("loss", "nat/byte", 1, step, 2.0 / (1 + step)) for step in range(2)],
    ]
    failed.apply_many([*pieces, piece(1, 3)])
    assert rows(failed) == once
    with failed.session() as session:
        assert session.execute(text("SELECT state FROM v_points WHERE point_id = :p"), {"p": FAILED}).scalar() == "hang"


def test_steps_that_are_done_again_have_their_latest_samples_which_come_last(failed: Store) -> None:
    """After a restart from a checkpoint: they are live, and the steps that are still ahead are the past."""
    before = piece(0, 8)
    again = piece(3, 2, times=(T0.timestamp() + 60, T0.timestamp() + 61), values=(7.0, 8.0))
    for told in ([before, again, before], [again]):  # a replay brings nothing back
        failed.apply_many(told)
        found = queries.series(failed, FAILED, attempt=1)
        assert found["step"].tolist() == [0, 1, 2, 5, 6, 7, 3, 4]
        assert found["value"].tolist()[-2:] == [7.0, 8.0]
        [exported] = json.loads(exporter.to_json(failed, [RUN]))[0]["points"][8]["series"]
        assert exported["steps"] == found["step"].tolist()
        assert exported["values"] == found["value"].tolist()
        assert exported["times"] == [at.isoformat() for at in found["at"]]
    assert queries.series(failed, FAILED, attempt=1, most=3)["step"].tolist()[-1] == 4


def test_a_read_can_be_thinned_to_samples_evenly_spaced_with_the_last(failed: Store) -> None:
    failed.apply_many([piece(0, 1000), piece(0, 7, rank=1)])
    frame = queries.series(failed, FAILED, attempt=1, most=100)
    many = frame.loc[frame["rank"] == 0, "step"].tolist()
    assert many == [*range(0, 1000, 10), 999]
    assert frame.loc[frame["rank"] == 1, "step"].tolist() == list(range(7))
    assert frame["at"].iloc[1] == T0 + timedelta(seconds=1.25)
