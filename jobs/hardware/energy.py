"""Energy that a GPU takes for work, by the driver's own counter."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pynvml
import torch

from jobs.hardware import nvml

LEAST_S = 2.0  # seconds of work that a figure needs: the counter moves in steps of up to a tenth of a second


@dataclass(frozen=True)
class Energy:
    """Energy of one GPU over work."""

    joules: float  # of the whole card, whoever uses it
    work: int  # units of work done meanwhile
    seconds: float


class EnergyMeter:
    """Sums a GPU's energy over stretches of work; what lies between them (checkpoints, evaluation) does not count.

    `gpu` is NVML's index or UUID; None: there is nothing to measure.
    """

    def __init__(self, gpu: str | None) -> None:
        self._gpu = gpu
        self.begun: tuple[float, float] | None = None  # joules and seconds at the begin of this stretch; None between
        self._sum = Energy(0.0, 0, 0.0)

    @classmethod
    def of(cls, device: torch.device) -> EnergyMeter:
        """The meter of a device of PyTorch's; of a CPU one that measures nothing."""
        if device.type != "cuda":
            return cls(None)
        index = torch.cuda.current_device() if device.index is None else device.index
        return cls(next(iter(nvml.visible_gpus()[index : index + 1]), None))

    def start(self) -> None:
        if (joules := self._counter()) is not None:
            self.begun = joules, time.perf_counter()

    def stop(self, work: int) -> None:
        """End the stretch, in which so much work was done; nothing happens without one."""
        if self.begun is None:
            return
        (before, since), self.begun = self.begun, None
        if (joules := self._counter()) is None:
            self._sum = Energy(0.0, 0, 0.0)
        else:
            seconds = self._sum.seconds + time.perf_counter() - since
            self._sum = Energy(self._sum.joules + joules - before, self._sum.work + work, seconds)

    @property
    def energy(self) -> Energy | None:
        """The sum of all stretches; None without a counter, without work, and if it lasted too short."""
        return self._sum if self._sum.work and self._sum.seconds >= LEAST_S else None

    def _counter(self) -> float | None:
        """Joules since the driver was loaded; None if the card or the driver reports none."""
        if self._gpu is not None:
            try:
                with nvml.session():
                    return pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml.handle(self._gpu)) / 1000
            except (nvml.NvmlError, pynvml.NVMLError):
                self._gpu = None
        return None
