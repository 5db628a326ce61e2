"""Messages of ranks in the process that started them: progress, imbalance, failures."""

from __future__ import annotations

import pytest
import torch
from trainings import Keeping

from jobs.process.messages import Samples
from jobs.process.reporter import ProcessReporter
from jobs.training.launch import RankWatch
from jobs.training.live import LiveTraining


def test_progress_is_that_of_the_slowest_rank() -> None:
    """A rank that does not get further is not hidden by the beats of the others."""
    seen: list[tuple[str, int]] = []
    watch = RankWatch(2, lambda phase, done=0, total=0: seen.append((phase, done)))
    fast, slow = (ProcessReporter(watch.note, rank=rank) for rank in (0, 1))
    for step in range(20):
        fast(f"phase {step}", step)
    slow("phase 0", 0)
    slow("phase 1", 1)
    for step in range(20, 30):
        fast(f"phase {step}", step)
    assert seen == [("phase 0", 0), ("phase 1", 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_imbalance_is_told_once_all_ranks_have_got_to_another_step(ranks: int) -> None:
    told = Keeping()
    watch = RankWatch(ranks, told)
    assert "rank_imbalance" not in told.series
    for step in range(1, 101):
        for rank in range(ranks):
            later = 17_000.0 if rank else 16_000.0  # the first step compiles
            ms = later if step == 1 else 10.0 if step <= 50 else 10.0 + 20 * rank
            watch.note(Samples(rank, step - rank % 2, 0.0, {"rank_compute_time": ms}))
            watch.note(Samples(rank, step - rank % 2, 0.0, {"training_memory": 400.0}))
    found = told.series.get("rank_imbalance", {})
    assert list(found) == (list(range(1, 100)) if ranks > 1 else [])
    if ranks == 2:
        assert found[3] == found[40] == 0
        assert found[99] == pytest.approx(50), "30 ms over the mean, 20 ms"


def test_a_live_compute_time_is_the_mean_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(0.25 * step for step in range(100))
    monkeypatch.setattr("jobs.training.live.time.perf_counter", lambda: next(clock))
    told = Keeping()
    live = LiveTraining(told, tokens=1, device=torch.device("cpu"), rank=1)
    for step, ms in enumerate([8.0, 4.0, *map(float, range(10))], 1):
        live.step(step, 1.0, 1.0, 1.0, ms)
    means = list(told.series["rank_compute_time"].values())
    assert means[:2] == [8, 6]
    assert means[-1] == 7, "of five steps"
