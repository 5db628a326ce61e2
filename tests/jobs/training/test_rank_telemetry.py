"""When a rank samples its GPU: rank 0 of two on the CPU, with stand-ins for its meter and for the other rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
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
from jobs.schema.quantities import GPU_UTILIZATION
from jobs.train import Spec
from jobs.training import report
from jobs.training.report import RankReport, train_rank

CPU = Machine("cpu", "test processor", 8 * 2**30)
STEPS, WARM_UP = 30, 3
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


def test_a_single_rank_leaves_its_gpu_to_the_supervisor(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    assert _train(text, 1, meter, monkeypatch).utilization is None
    assert meter.gpu_ids == []
