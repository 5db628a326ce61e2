"""The live series of a training, a sample a step, as the step was; and when a rank samples its GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from trainings import Keeping, small
from travelling import travelled

from jobs.hardware.telemetry import TelemetrySummary
from jobs.schema.point import Machine, Metric
from jobs.schema.quantities import GPU_UTILIZATION, Quantities
from jobs.train import QUANTITIES, Case, Spec, measure
from jobs.training import report
from jobs.training.live import LiveTraining, ModelFlops
from jobs.training.optimizer import learning_rate
from jobs.training.report import RankReport, train_rank

STEPS, WARM_UP = 30, 3


@pytest.fixture
def case(text: Path) -> Case:
    spec = Spec.model_validate(small(text, seq_len=48, steps=STEPS))
    return travelled(spec.points(Machine("cpu", "test processor", 8 * 2**30))[0])


class Report(Keeping):
    """Keeps samples and beats in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[int, Mapping[str, float]]] = []
        self.beats: list[tuple[str, int, int]] = []

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.beats.append((phase, done, total))

    def sample(self, step: int, values: dict[str, float], rank: int = 0) -> None:
        assert rank == 0
        self.samples.append((step, values))


def test_every_step_is_reported_as_it_was(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    clip = torch.nn.utils.clip_grad_norm_

    def noted(*args: Any, **more: Any) -> torch.Tensor:
        norms.append(clip(*args, **more).item())
        return torch.tensor(norms[-1])

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    report = Report()
    result = measure(case, report)
    losses = next(metric.samples for metric in result.metrics if metric.name == "loss")
    assert [step for step, _ in report.samples] == list(range(1, STEPS + 1))
    declared = Quantities(QUANTITIES)
    for (step, values), loss, norm in zip(report.samples, losses, norms, strict=False):
        assert values.keys() == {"loss", "gradient_norm", "learning_rate", "throughput", "training_memory"}
        assert all(name in declared.names() for name in values)
        assert values["loss"] == loss
        assert values["gradient_norm"] == pytest.approx(norm)
        assert values["learning_rate"] == learning_rate(case.optimizer, step - 1, STEPS)
        assert 50 < values["training_memory"] < 8 * 1024
    assert ("train", STEPS - 1, STEPS) in report.beats


def test_the_throughput_is_that_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *(0.25 * step for step in range(1, 9)), *(2 + 0.125 * step for step in range(1, 17))])
    monkeypatch.setattr("jobs.training.live.time.perf_counter", lambda: next(clock))
    report = Report()
    flops = ModelFlops(per_token=6e6, peak=1.2e9, ranks=2)
    live = LiveTraining(report, tokens=100, device=torch.device("cpu"), flops=flops)
    for step in range(89, 113):  # a resumed training begins at any step
        live.step(step, 1.0, 1.0, 1.0)
    speeds = [values["throughput"] for _, values in report.samples]
    assert speeds[:8] == pytest.approx([400] * 8)
    assert speeds[-4:] == pytest.approx([800] * 4)
    assert [values["mfu"] for _, values in report.samples[:8]] == pytest.approx([100] * 8), "400 tok/s x 6 MFLOPs"


# When a rank samples its GPU


CPU = Machine("cpu", "test processor", 8 * 2**30)
BUSY = Metric.of(GPU_UTILIZATION, 90.0)


class Meter(Keeping):
    """In place of a rank's Telemetry, and its Reporter: keeps, in order, phases with steps done, starts and stops."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.gpu_ids: Sequence[str] = ()

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.events.append((phase, done))

    def of(self, gpu_ids: Sequence[str]) -> Meter:
        self.gpu_ids = gpu_ids
        return self

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> TelemetrySummary:
        self.events.append("stop")
        return TelemetrySummary((BUSY,) if self.gpu_ids else (), "")

    def paused(self) -> nullcontext[None]:
        return nullcontext()


@pytest.fixture
def other_rank() -> Iterator[None]:
    """A process group of two ranks, of which the other one agrees with this one in everything."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def _train(text: Path, ranks: int, meter: Meter, monkeypatch: pytest.MonkeyPatch) -> RankReport:
    monkeypatch.setattr(report, "Telemetry", meter.of)
    monkeypatch.setattr(report, "_gpu", lambda device: "GPU-1")
    parallel = {"ranks": ranks, "parallel": "replicate"} if ranks > 1 else {}
    spec = Spec.model_validate(small(text, steps=STEPS, **parallel))
    return train_rank(travelled(spec.points(CPU)[0]), torch.device("cpu"), 0, meter, threading.Event())


def test_a_rank_samples_its_gpu_in_the_steady_steps_alone(
    text: Path, other_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading, the check, compilation in the first steps, and held-out losses are no work of the training."""
    meter = Meter()
    found = _train(text, 2, meter, monkeypatch)
    assert meter.gpu_ids == ["GPU-1"]
    begin, end = meter.events.index("start"), meter.events.index("stop")
    assert meter.events.count("start") == 1
    assert {"corpus", "check", "heldout loss before"} <= {phase for phase, _ in meter.events[:begin]}
    assert meter.events[begin - 1] == ("train", WARM_UP), "it starts when the first steady step has ended"
    assert meter.events[begin + 1 : end] == [("train", done) for done in range(WARM_UP + 1, STEPS)]
    assert "heldout loss" in {event[0] for event in meter.events[end:]}
    assert found.utilization == BUSY
