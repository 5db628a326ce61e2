"""The live series of a training, a sample a step, as the step was; and when a rank samples its GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import Keeping, small
from travelling import travelled

from jobs.schema.point import Machine
from jobs.train import Case, Spec, measure
from jobs.training.case import learning_rate
from jobs.training.live import LiveTraining

STEPS = 30


@pytest.fixture
def case(text: Path) -> Case:
    spec = Spec.model_validate(small(text, seq_len=48, steps=STEPS))
    return travelled(spec.points(Machine("cpu", "test processor", 8 * 2**30))[0])


def test_every_step_is_reported_as_it_was(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noted(*args: Any, **more: Any) -> torch.Tensor:
        norms.append(clip(*args, **more).item())
        return torch.tensor(norms[-1])

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    report = Keeping()
    result = measure(case, report)
    losses = next(metric.samples for metric in result.metrics if metric.name == "loss")
    series = {name: list(values.values()) for name, values in report.series.items()}
    assert series.keys() == {"loss", "gradient_norm", "learning_rate", "throughput", "training_memory"}
    assert all(list(values) == list(range(1, STEPS + 1)) for values in report.series.values())
    assert series["loss"] == list(losses)
    assert series["gradient_norm"] == pytest.approx(norms[:STEPS])
    assert series["learning_rate"] == [learning_rate(case.optimizer, step, STEPS) for step in range(STEPS)]
    assert all(50 < memory < 8 * 1024 for memory in series["training_memory"])


def test_the_throughput_is_that_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *(0.25 * step for step in range(1, 9)), *(2 + 0.125 * step for step in range(1, 17))])
    monkeypatch.setattr("jobs.training.live.time.perf_counter", lambda: next(clock))
    report = Keeping()
    live = LiveTraining(report, tokens=100, device=torch.device("cpu"), flops=(6e6, 2.4e9))
    for step in range(89, 113):  # a resumed training begins at any step
        live.step(step, 1.0, 1.0, 1.0)
    speeds = list(report.series["throughput"].values())
    assert speeds[:8] == pytest.approx([400] * 8)
    assert speeds[-4:] == pytest.approx([800] * 4)
    assert list(report.series["mfu"].values())[:8] == pytest.approx([100] * 8), "400 tok/s x 6 MFLOPs"
