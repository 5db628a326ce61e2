"""The schedule of faults: from the seed alone, every kind in each round, within the time."""

from __future__ import annotations

import pytest
from chaos.schedule import Kind, schedule


@pytest.mark.parametrize(("minutes", "rounds"), [(3, 1), (10, 3)])
@pytest.mark.parametrize("seed", range(20))
def test_every_kind_happens_in_each_round_within_the_time(seed: int, minutes: float, rounds: int) -> None:
    faults = schedule(seed, minutes)
    for number in range(rounds):
        assert {fault.kind for fault in faults[number * len(Kind) : (number + 1) * len(Kind)]} == set(Kind)
    times = [fault.at_s for fault in faults]
    assert times == sorted(times)
    assert len(faults) == rounds * len(Kind)
    assert times[-1] < 60 * minutes
