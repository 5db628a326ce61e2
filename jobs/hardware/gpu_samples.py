"""Samples of GPUs: a look at one by NVML, and many samples merged into fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import TypeVar

import pynvml

from jobs.hardware import nvml

T = TypeVar("T", int, float)


MOST = 20_000
"""Samples that are kept of a GPU, an hour's; beyond it those in a row are merged."""


@dataclass(frozen=True)
class Sample:
    """State of one GPU at a look, or over several; None for values that the driver does not report."""

    gpu: str
    number: int  # of the look at all GPUs, from 0
    seconds: float  # since the look before; 0 of the first one, and after a pause
    utilization: float | None  # percent of the last driver interval in which a kernel ran
    memory_mib: float | None
    power_w: float | None
    sm_mhz: float | None
    celsius: float | None
    throttle: int | None  # bit mask of all reasons
    pids: tuple[int, ...] | None  # of all processes
    throttled: float | None = None  # share of the looks with a throttle
    processes: int | None = None  # the most at one look
    joules: float | None = None  # since the power was last known; None of the first look, and after a pause
    weight: int = 1  # time that it stands for, in its telemetry's first periods


class GpuSampler:
    """Takes the samples of one GPU. Raises NvmlError if there is no such GPU."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._device = nvml.handle(gpu)
        self._throttles = nvml.throttles(self._device)
        self._looked: float | None = None
        self._power: tuple[float, float] | None = None  # time at which it was last known, and watts

    def pause(self) -> None:
        """Leave out the time until the next sample."""
        self._looked = self._power = None

    def sample(self, number: int, clock: float, weight: int = 1) -> Sample:
        """Sample of now, which is `clock` in seconds."""
        memory = nvml.ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(self._device).used)
        power = nvml.ask(lambda: pynvml.nvmlDeviceGetPowerUsage(self._device))
        throttle = nvml.ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device))
        pids = nvml.ask(lambda: nvml.compute_pids(self._device))
        since, self._looked = self._looked, clock
        joules = None  # since the power was last known, by the trapezoidal rule
        if power is not None:
            before, self._power = self._power, (clock, power / 1000)
            joules = None if before is None else (before[1] + power / 1000) / 2 * (clock - before[0])
        return Sample(
            gpu=self._gpu,
            number=number,
            seconds=0.0 if since is None else clock - since,
            utilization=nvml.ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(self._device).gpu),
            memory_mib=None if memory is None else int(memory) / 2**20,
            power_w=None if power is None else power / 1000,
            sm_mhz=nvml.ask(lambda: pynvml.nvmlDeviceGetClockInfo(self._device, pynvml.NVML_CLOCK_SM)),
            celsius=nvml.ask(lambda: pynvml.nvmlDeviceGetTemperature(self._device, pynvml.NVML_TEMPERATURE_GPU)),
            throttle=throttle,
            pids=None if pids is None else tuple(pids),
            throttled=None if throttle is None else float(bool(throttle & self._throttles)),
            processes=None if pids is None else len(pids),
            joules=joules,
            weight=weight,
        )


def bounded(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that stand for the same time each, at most MOST of a GPU: those in a row are merged."""
    weight = max((sample.weight for sample in samples), default=1)
    found = merged(samples, weight)
    while max(Counter(sample.gpu for sample in found).values(), default=0) > MOST:
        weight *= 2
        found = merged(found, weight)
    return found


def merged(samples: Sequence[Sample], weight: int) -> list[Sample]:
    """Samples of which those of a GPU in a row are merged up to a weight, in order."""
    growing: dict[str, Sample] = {}
    full = []
    for sample in samples:
        before = growing.get(sample.gpu)
        if before is not None and before.weight + sample.weight <= weight:
            sample = _merged(before, sample)
        elif before is not None:
            full.append(before)
        growing[sample.gpu] = sample
    return [*full, *growing.values()]


def _merged(first: Sample, second: Sample) -> Sample:
    """Means of two samples of a GPU by their time, their sums, their highest, or all that there was."""

    mean = partial(mean_over, (first, second))
    throttles = [each.throttle for each in (first, second) if each.throttle is not None]
    pids = [set(each.pids) for each in (first, second) if each.pids is not None]
    joules = [each.joules for each in (first, second) if each.joules is not None]
    return Sample(
        gpu=first.gpu,
        number=second.number,
        seconds=first.seconds + second.seconds,
        utilization=mean(lambda sample: sample.utilization),
        memory_mib=_highest(first.memory_mib, second.memory_mib),
        power_w=mean(lambda sample: sample.power_w),
        sm_mhz=mean(lambda sample: sample.sm_mhz),
        celsius=mean(lambda sample: sample.celsius),
        throttle=reduce(or_, throttles) if throttles else None,
        pids=tuple(sorted(set[int]().union(*pids))) if pids else None,
        throttled=mean(lambda sample: sample.throttled),
        processes=_highest(first.processes, second.processes),
        joules=sum(joules) if joules else None,
        weight=first.weight + second.weight,
    )


def _highest(first: T | None, second: T | None) -> T | None:
    return max((value for value in (first, second) if value is not None), default=None)


def mean_over(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Mean of a value of samples, by the time that they stand for; None if it is known of none."""
    known = [(told, sample.weight) for sample in samples if (told := value(sample)) is not None]
    return sum(told * weight for told, weight in known) / sum(weight for _, weight in known) if known else None
