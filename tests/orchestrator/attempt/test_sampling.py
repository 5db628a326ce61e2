"""Samples of live series in a point's process: checked, thinned, never in the way."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest

from jobs.schema.point import reporter
from jobs.schema.quantities import Quantities, Quantity
from jobs.specs.spec import Deadlines
from orchestrator.attempt import protocol, sampling
from orchestrator.attempt.live import LEAST_PIECE_S
from orchestrator.attempt.sampling import SamplingReporter, interval
from orchestrator.attempt.supervisor import supervise
from orchestrator.attempt.worker import Events, run_point
from orchestrator.messages import Assignment, Conditions, Series

DECLARED = Quantities(
    [Quantity("loss", "nat/byte", "Loss"), Quantity("speed", "tok/s", "Speed"), Quantity("stage_*", "ms", "Stage")]
)

TWO_RANKS = """
import time
for step in range(40):
    beat("train", step, 40)
    beat.sample(step, {"time": 1.5 * step}, step % 2)
    time.sleep(0.1)
"""


class Sent(list[protocol.Samples]):
    def reporter(self) -> SamplingReporter:
        return SamplingReporter(lambda phase, done=0, total=0: None, self.append, DECLARED)

    def of(self, name: str, rank: int = 0) -> list[tuple[int, float]]:
        return [(each.step, each.values[name]) for each in self if each.rank == rank and name in each.values]


def test_samples_of_a_second_are_thinned_to_one_and_the_last_is_sent(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "LEAST_INTERVAL_S", 0.2)
    sent = Sent()
    report = sent.reporter()
    begun = time.monotonic()
    for step in range(50):
        report.sample(step, {"loss": float(step), "speed": 2.0 * step})
        report.sample(step, {"speed": 7.0}, rank=1)
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    report.close()
    losses = sent.of("loss")
    assert losses[-1] == (49, 49.0)
    assert 3 <= len(losses) <= seconds / 0.2 + 2
    assert [step for step, _ in losses] == sorted({step for step, _ in losses})
    assert [value for _, value in sent.of("speed")] == [2.0 * step for step, _ in sent.of("speed")]
    assert sent.of("speed", rank=1)[-1] == (49, 7.0)
    assert {unit for each in sent for unit in each.units.items()} == {("loss", "nat/byte"), ("speed", "tok/s")}


def test_the_interval_grows_with_the_run() -> None:
    assert interval(0) == interval(1999) == 1
    assert interval(4000) == 2
    count, elapsed = 0, 0.0
    while elapsed < 24 * 3600:
        count, elapsed = count + 1, elapsed + interval(elapsed)
    assert count < 10_000, "a day of training"


def test_a_full_pipe_does_not_hold_up_a_step(monkeypatch) -> None:
    monkeypatch.setattr(sampling, "LEAST_INTERVAL_S", 0.01)
    stuck, sent = threading.Event(), []
    report = SamplingReporter(lambda *_: None, lambda _: sent.append(stuck.wait(60)), DECLARED)
    for step in range(200):
        report.sample(step, {"loss": 1.0, "speed": 2.0})
        time.sleep(0.001)
    assert sent == [], "the sender is stuck for as long as the loop runs"
    stuck.set()
    report.close()
    assert sent


def test_a_series_must_be_declared_and_in_order() -> None:
    report = Sent().reporter()
    for name in ("lost", "stage_*", "stage_merge"):
        with pytest.raises(ValueError, match=r"series .*: is not declared by this name; mend the kind's QUANTITIES"):
            report.sample(0, {"loss": 1.0, name: 1.0})
    for step, rank in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="0 or more"):
            report.sample(step, {"loss": 1.0}, rank)


def test_a_value_that_is_not_finite_is_left_out() -> None:
    sent = Sent()
    report = sent.reporter()
    report.sample(1, {"loss": math.nan, "speed": 3.0})
    report.close()
    assert sent.of("loss") == []
    assert sent.of("speed") == [(1, 3.0)]


def test_a_plain_function_may_stand_for_a_reporter() -> None:
    beats: list[tuple] = []
    report = reporter(lambda phase, done=0, total=0: beats.append((phase, done, total)))
    report("train", 1, 2)
    report.sample(1, {"anything": 1.0})
    assert beats == [("train", 1, 2)]


def test_an_undeclared_series_is_an_error_of_its_point(snippet_kind) -> None:
    read, write = os.pipe()
    failure = run_point(protocol.Run("snippet", {"code": "beat.sample(1, {'lost': 1.0})"}, "cpu", None), Events(write))
    os.close(read)
    os.close(write)
    assert isinstance(failure, protocol.Failure)
    assert failure.reason.startswith("ValueError: series lost: is not declared by this name")


def test_a_supervisor_passes_series_on_in_pieces(snippet_kind) -> None:
    conditions = Conditions("cpu", Deadlines(startup_s=30, heartbeat_s=10, point_s=60))
    begun = time.monotonic()
    updates = list(supervise([Assignment("r", "r/0", 3, snippet_kind.point(TWO_RANKS))], conditions))
    pieces = [update.records for update in updates if isinstance(update, Series)]
    assert 2 <= len(pieces) <= (time.monotonic() - begun) / LEAST_PIECE_S + 1, "pieces of two seconds, and the rest"
    records = [record for piece in pieces for record in piece]
    assert {(record.run_id, record.point_id, record.attempt) for record in records} == {("r", "r/0", 3)}
    for rank in range(2):
        mine = [record for record in records if (record.name, record.rank) == ("time", rank)]
        steps = [step for record in mine for step in record.steps]
        assert steps == sorted(set(steps))
        assert steps[-1] == 38 + rank
        assert [value for record in mine for value in record.values] == [1.5 * step for step in steps]
        assert all(abs(at - time.time()) < 60 for record in mine for at in record.times)
    usage = {record.name: record for record in records if record.name != "time"}
    assert {(record.name, record.unit) for record in usage.values()} == {
        ("cpu_utilization", "%"),
        ("resident_memory", "MiB"),
    }
    assert 5 < usage["resident_memory"].values[-1] < 2000
    assert all(0 <= value < 300 for value in usage["cpu_utilization"].values)
