"""The live part of a point's page: series that grow, the end of the phase, what was expected."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs

import pytest
from dashboard_pages import chart_titles, show, text

from dashboard import live
from orchestrator.store import Store
from orchestrator.store.records import PointRecord, Progress, RunRecord, SeriesRecord, StartRecord

RUN = "20261123-120000-train-ab12"
POINT = f"{RUN}/0"
PLAN = {"steps": 1000, "tokens_per_step": 1024, "hours": 1.0}


def piece(
    name: str, unit: str, values: list[float], first: int = 0, rank: int = 0, at: datetime | None = None
) -> SeriesRecord:
    steps = tuple(range(first, first + len(values)))
    begun = (at or datetime.now(UTC)).timestamp()
    return SeriesRecord(
        run_id=RUN, point_id=POINT, attempt=1, rank=rank, name=name, unit=unit, steps=steps,
        times=tuple(begun + step for step in steps), values=tuple(values),
    )  # fmt: skip


def training(
    url: str, *pieces: SeriesRecord, plan: Any = None, estimate: int | None = None, device: str = "cpu"
) -> None:
    """A database with one running training."""
    now = datetime.now(UTC) - timedelta(minutes=2)
    begun = RunRecord(run_id=RUN, at=now, name="train", kind="train", spec={}, spec_hash="5")
    axes = {"implementation": "nsa", "seq_len": 128, "device": device}
    planned = PointRecord(
        run_id=RUN, at=now, point_id=POINT, index=0, key="0", label="nsa tiny", config={"plan": plan}, axes=axes,
        estimate_bytes=estimate,
    )  # fmt: skip
    with Store.open(url) as store:
        store.apply_many([begun, planned, StartRecord(run_id=RUN, at=now, point_id=POINT, attempt=1), *pieces])
        store.beat(Progress(RUN, POINT, datetime.now(UTC), "train", 300, 900, 2.0))


def test_a_running_point_shows_its_series_and_when_it_ends(database: str) -> None:
    training(database, piece("loss", "nat/byte", [4.0, 3.0]), piece("cpu_utilization", "%", [91.0, 90.0]))
    app = show("runs", run=RUN, point=POINT)
    said = text(app)
    assert "train: 300 of 900 at 2 a second, about **5 min** left" in said
    assert "Series" in said
    assert "CPU utilisation: 90 %" in said
    assert ": 3 nat/byte" in said
    assert "Expected against actual" not in said, "without a plan or an estimate nothing was expected"
    assert len(app.get("vega_lite_chart")) == 2
    links = {link.proto.label: link.proto.query_string for link in show("runs", run=RUN).get("page_link")}
    assert parse_qs(links["Live"]) == {"run": [RUN], "point": [POINT]}


def test_expected_stands_against_actual(database: str) -> None:
    pieces = [
        piece("throughput", "tok/s", [100.0, 142.2]),
        *(piece("gpu_utilization", "%", [10.0, 96.0 - 30 * rank, 97.0 - 30 * rank], rank=rank) for rank in range(2)),
        piece("training_memory", "MiB", [50.0, 120.0]),
        piece("rank_imbalance", "%", [3.0, 2.5]),
        piece("mfu", "%", [41.0, 42.0]),
    ]
    training(database, *pieces, plan=PLAN, estimate=100 << 20, device="cuda")
    app = show("runs", run=RUN, point=POINT)
    said = text(app)
    captions = chart_titles(app)
    first = captions.index("MFU: 42 %")
    assert captions[first - 1 : first + 2] == ["Throughput: 142.2 tok/s", "MFU: 42 %", "Rank imbalance: 2.5 %"]
    assert "Throughput,≥ 284.4 tok/s,142.2 tok/s,✗ no" in said
    assert "Time of the planned run,≤ 1 h,2 h,✗ no" in said
    assert "Memory,100 MiB estimated,120 MiB,✗ no" in said
    assert 'median of the least busy rank",≥ 80 %,66 %,✗ no' in said
    assert "67 to 97 %, 2 ranks" in said


@pytest.mark.parametrize("changes", [{"rate": None}, {"rate": 0.0}, {"total": 0}, {"running": 0}, {"rate": 1e-300}])
def test_an_end_that_is_unknown_is_not_told(changes: dict) -> None:
    point = {"running": 1, "phase": "train", "done": 300, "total": 900, "rate": 2.0}
    assert live.remaining(point)
    assert live.remaining(point | changes) == ""
