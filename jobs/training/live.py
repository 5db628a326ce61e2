"""The live series of a training: what is told of each step while it runs."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from jobs.schema.point import Beat, reporter
from jobs.schema.quantities import THROUGHPUT, Better, Plot, Quantity, Role

LOSS = Quantity("loss", "nat/byte", "Training loss", "loss", Better.LOWER, Role.HEADLINE, Plot.CURVE)
GRADIENT_NORM = Quantity("gradient_norm", "1", "Gradient norm before clipping", "gradient norm")
LEARNING_RATE = Quantity("learning_rate", "1", "Learning rate")
TRAINING_MEMORY = Quantity("training_memory", "MiB", "Memory of the training process", "memory")
MFU = Quantity("mfu", "%", "Model FLOPs utilisation", "MFU", Better.HIGHER, Role.HEADLINE)
SERIES = (GRADIENT_NORM, LEARNING_RATE, TRAINING_MEMORY)

_WINDOW_S = 1.0


class LiveTraining:
    """Reports a sample a step of loss, gradient norm, learning rate, throughput, MFU and memory.

    Args:
        beat: the measurement's; samples are dropped if it takes none.
        tokens: tokens of a step, of all ranks.
        rank: the rank that reports.
        utilization: gives the MFU [%] at a throughput [tok/s]; None: no peak is known.
    """

    def __init__(
        self,
        beat: Beat,
        tokens: int,
        device: torch.device,
        rank: int = 0,
        utilization: Callable[[float], float] | None = None,
    ) -> None:
        self._report = reporter(beat)
        self._tokens = tokens
        self._device = device
        self._rank = rank
        self._utilization = utilization
        self._begun = time.perf_counter()
        self._steps: deque[tuple[float, int]] = deque()  # end and number of the steps of the last second
        self._memory = 0.0  # MiB, as last looked at
        self._looked = -_WINDOW_S

    def step(self, step: int, loss: float, gradient_norm: float, learning_rate: float) -> None:
        """Report that step `step`, from 1, has ended; waits for nothing."""
        clock = time.perf_counter()
        if clock - self._looked >= _WINDOW_S:
            self._looked, self._memory = clock, memory_mib(self._device)
        if not self._steps:
            self._steps.append((self._begun, step - 1))  # a resumed training begins at any step
        self._steps.append((clock, step))
        while len(self._steps) > 2 and clock - self._steps[1][0] >= _WINDOW_S:
            self._steps.popleft()
        since, before = self._steps[0]
        throughput = (step - before) * self._tokens / max(clock - since, 1e-9)
        values = {
            LOSS.name: loss,
            GRADIENT_NORM.name: gradient_norm,
            LEARNING_RATE.name: learning_rate,
            THROUGHPUT.name: throughput,
            TRAINING_MEMORY.name: self._memory,
        }
        if self._utilization is not None:
            values[MFU.name] = self._utilization(throughput)
        self._report.sample(step, values, self._rank)


def memory_mib(device: torch.device) -> float:
    """Most memory allocated so far on a GPU, present resident memory of this process on a CPU [MiB]; no waiting."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: no value, which is not reported
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
