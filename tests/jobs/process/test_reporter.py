"""Progress and samples of live series inside a process: checked, thinned, never in the way."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.process import reporter as reporting
from jobs.process.messages import Beat
from jobs.process.reporter import BEAT_INTERVAL_S, ProcessReporter
from jobs.schema.point import Samples

UNITS = {"loss": "nat/byte", "speed": "tok/s"}


class Sent(list[Any]):
    def reporter(self, **options: Any) -> ProcessReporter:
        return ProcessReporter(self.append, **{"units": UNITS, **options})

    def of(self, name: str, rank: int = 0) -> list[tuple[int, float]]:
        samples = [each for each in self if isinstance(each, Samples)]
        return [(each.step, each.values[name]) for each in samples if each.rank == rank and name in each.values]


def test_beats_of_a_phase_are_thinned_but_a_new_phase_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = [7.0], Sent()
    report = sent.reporter()
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for done in range(100):
        report("timing", done, 100)
    report("memory")
    clock[0] += BEAT_INTERVAL_S + 0.001
    report("memory", 1, 2)
    assert [(beat.phase, beat.done) for beat in sent] == [("timing", 0), ("memory", 0), ("memory", 1)]
    assert sent[-1] == Beat("memory", 1, 2, number=102), "counts all"


def test_samples_of_a_second_are_thinned_to_one_and_the_last_is_sent() -> None:
    sent = Sent()
    report = sent.reporter(interval=lambda _: 0.2)
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
    assert {unit for each in sent for unit in each.units.items()} == set(UNITS.items())


def test_a_full_pipe_does_not_hold_up_a_step() -> None:
    stuck, sent = threading.Event(), []
    report = ProcessReporter(lambda _: sent.append(stuck.wait(60)), units=UNITS, interval=lambda _: 0.01)
    for step in range(200):
        report.sample(step, {"loss": 1.0, "speed": 2.0})
        time.sleep(0.001)
    assert sent == [], "the sender is stuck for as long as the loop runs"
    stuck.set()
    report.close()
    assert sent


def test_a_series_must_be_declared_and_in_order_and_finite() -> None:
    sent = Sent()
    report = sent.reporter()
    with pytest.raises(ValueError, match=r"series lost: is not declared by this name; mend the kind's QUANTITIES"):
        report.sample(0, {"loss": 1.0, "lost": 1.0})
    for step, rank in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="0 or more"):
            report.sample(step, {"loss": 1.0}, rank)
    report.sample(1, {"loss": math.nan, "speed": 3.0})
    report.close()
    assert (sent.of("loss"), sent.of("speed")) == ([], [(1, 3.0)])
