"""The pace of a point: steps a second on the wall clock, through what interrupts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.execute.live import Pace


class Clock:
    """The seconds that a test lets pass."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("orchestrator.execute.live.time.monotonic", lambda: clock.now)
    return clock


def _train(pace: Pace, clock: Clock, steps: range, each_s: float, after: Callable[[int], None]) -> list[float | None]:
    """Train 500 steps as `steps` has them, with what comes after each; returns the rates."""
    rates = []
    for step in steps:
        rates.append(pace.note("train", step, 500)[2])
        clock.now += each_s
        after(step + 1)
    return rates


def test_checkpoints_and_losses_between_the_steps_count_and_do_not_hide_the_pace(clock: Clock) -> None:
    pace, checkpoints = Pace(), []

    def between(step: int) -> None:
        if step % 25 == 0:
            for done in range(2):
                pace.note("heldout loss", done, 2)
            checkpoints.append(pace.note("checkpoint", 0, 0))
            clock.now += 2.5
            checkpoints.append(pace.note("checkpoint", 7, 0))

    rates = _train(pace, clock, range(300), 0.1, between)
    assert all(rates[15:]), "from a second on"
    assert rates[-25] == pytest.approx(5, rel=0.05), "25 steps and a checkpoint take 5 s"
    assert [checkpoint[:2] for checkpoint in checkpoints[1:3]] == [(24, 500), (49, 500)]
    assert all(rate for *_, rate in checkpoints)


def test_a_restart_begins_a_new_pace_and_another_phase_has_its_own(clock: Clock) -> None:
    pace = Pace()
    assert pace.note("corpus", 0, 0) == (0, 0, None)
    clock.now += 2
    assert pace.note("corpus", 8, 0) == (8, 0, 4)
    _train(pace, clock, range(100), 0.1, lambda _: None)
    assert pace.note("checkpoint", 3, 0)[:2] == (99, 500)
    assert pace.note("comparison", 0, 0) == (0, 0, None), "it interrupts nothing"
    assert pace.note("train", 50, 500) == (50, 500, None)
    clock.now += 2
    assert pace.note("train", 60, 500) == (60, 500, 5)
    pace.note("train", 499, 500)
    assert pace.note("memory", 3, 0) == (3, 0, None), "the training is done"
