"""Samples and readings of ranks on a cluster, through all their starts; tests/e2e/test_ray_ranks.py has the rest."""

from __future__ import annotations

import os
import time

from orchestrator.execute.ray_rank import NodeAgent, Placed


def test_readings_of_ranks_that_were_started_again_have_numbers_of_their_own() -> None:
    """The store keeps one sample of a number."""
    numbers: list[int] = []
    for _ in range(2):
        here = [Placed(rank, "id", "here", os.getpid(), None, "/tmp/none", {}) for rank in (0, 1)]
        agent = NodeAgent(here, 1, max(numbers, default=-1))
        until = len(numbers) + 2
        while len(numbers) < until:
            numbers += [reading.number for reading in agent.readings() if reading.rank == 0]
            time.sleep(0.05)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4
