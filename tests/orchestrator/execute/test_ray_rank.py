"""Samples and readings of ranks on a cluster, through all their starts; tests/e2e/test_ray_ranks.py has the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from jobs.hardware.gpu_samples import Sample
from jobs.hardware.telemetry import energy, summarise_samples
from jobs.schema.point import Reading
from jobs.schema.quantities import GPU_UTILIZATION
from orchestrator.execute.ray_launcher import NodeAgents
from orchestrator.execute.ray_rank import NodeAgent, Placed


def _taken(monkeypatch: pytest.MonkeyPatch, pieces: Sequence[list[Sample]]) -> list[Sample]:
    """The samples of ranks that were started again and again."""
    agents = NodeAgents(lambda _: None)
    for piece in pieces:
        monkeypatch.setattr("orchestrator.execute.ray_launcher.answers", lambda *_, piece=piece: {"id-a": piece})
        agents.end()
    return agents.samples


def _piece(samples: int, utilization: float, gpu: str = "a:0", weight: int = 1) -> list[Sample]:
    """Samples of one start of a rank, of a second for each weight and of 100 W."""
    values = (utilization, 1000.0, 100.0, 1500.0, 40.0, 0, (1,), 0.0, 1)
    seconds = [0.0, *[float(weight)] * (samples - 1)]
    return [Sample(gpu, n, s, *values, 100 * s if s else None, weight) for n, s in enumerate(seconds)]


def test_samples_of_many_pieces_are_bounded_and_weigh_by_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.hardware.gpu_samples.MOST", 50)
    pieces = [_piece(2, 0.0), _piece(40, 90.0, weight=4), *(_piece(3, 10.0) for _ in range(20))] * 5
    samples = _taken(monkeypatch, pieces)
    assert len(samples) <= 50
    assert sum(sample.weight for sample in samples) == 5 * (2 + 160 + 60)
    assert energy(samples) == pytest.approx(5 * 100 * (1 + 4 * 39 + 2 * 20))
    values = {metric.name: metric.value for metric in summarise_samples(samples).metrics}
    assert values[GPU_UTILIZATION.name] == pytest.approx(90.0), "the middle of the time"


def test_live_readings_become_rarer_through_all_pieces_of_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a single process: thousands for ten hours, not for each; the wait for room counts for nothing."""
    clock, asked = 0.0, []
    monkeypatch.setattr("orchestrator.execute.ray_launcher.time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(ray, "wait", lambda answers, **_: (answers, []))
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    watch = SimpleNamespace(
        readings=SimpleNamespace(remote=lambda: asked.append(clock) or [Reading(0, 1, 0.0, {GPU_UTILIZATION: 50.0})]),
        samples=SimpleNamespace(remote=tuple),
    )
    starting = SimpleNamespace(remote=lambda *_: watch)
    monkeypatch.setattr("orchestrator.execute.ray_launcher.actor", lambda *_: starting)
    sent: list[Any] = []
    agents = NodeAgents(sent.append)
    clock = room = 2 * 24 * 3600.0
    for piece in range(1, 11):
        agents.begin({0: Placed(0, "id-a", "a", 17, "0", "/tmp/none", {})}, 1)
        while clock < room + 3600 * piece:
            clock += 0.5
            agents.read()
        agents.end()
    assert 5000 < len(asked) < 9000
    assert len(sent) >= len(asked) - 10


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
