"""Samples of GPUs: a look at one by NVML, and many samples merged into fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import pynvml

from jobs.measure import nvml

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Sample:
    """State of one GPU at a look, or over several; None for values that the driver does not report."""

    gpu: str
    number: int  # of the look at all GPUs, from 0
    seconds: float  # since start()
    utilization: float | None  # percent of the last driver interval in which a kernel ran
    memory_mib: float | None
    power_w: float | None
    sm_mhz: float | None
    celsius: float | None
    throttle: int | None  # bit mask of all reasons
    pids: tuple[int, ...] | None  # of all processes
    throttled: float | None = None  # share of the looks with a throttle
    processes: int | None = None  # the most at one look


def look(gpu: str, device: Any, number: int, seconds: float) -> Sample:
    """Sample of the GPU with this NVML handle, now."""

    def ask(query: Callable[[], Any]) -> Any:
        try:
            return query()
        except (pynvml.NVMLError, nvml.NvmlError):  # not supported by this driver or card; other queries may be
            return None

    memory = ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(device).used)
    power = ask(lambda: pynvml.nvmlDeviceGetPowerUsage(device))
    throttle = ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
    pids = ask(lambda: nvml.compute_pids(device))
    return Sample(
        gpu=gpu,
        number=number,
        seconds=seconds,
        utilization=ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu),
        memory_mib=None if memory is None else int(memory) / 2**20,
        power_w=None if power is None else power / 1000,
        sm_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)),
        celsius=ask(lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
        throttle=throttle,
        pids=None if pids is None else tuple(pids),
        throttled=None if throttle is None else float(bool(throttle & sum(nvml.THROTTLES))),
        processes=None if pids is None else len(pids),
    )


def halved(samples: Sequence[Sample]) -> list[Sample]:
    """Samples of which each stands for two of the same GPU, in order; a last one without a partner stays."""
    waiting: dict[str, Sample] = {}
    pairs = []
    for sample in samples:
        if (before := waiting.pop(sample.gpu, None)) is None:
            waiting[sample.gpu] = sample
        else:
            pairs.append(_merged(before, sample))
    return [*pairs, *waiting.values()]


def _merged(first: Sample, second: Sample) -> Sample:
    """Means of two samples of a GPU; their highest memory and most processes at once, all throttles and processes."""
    throttles = [each.throttle for each in (first, second) if each.throttle is not None]
    pids = [set(each.pids) for each in (first, second) if each.pids is not None]
    return Sample(
        gpu=first.gpu,
        number=second.number,
        seconds=(first.seconds + second.seconds) / 2,
        utilization=mean_of_known([first.utilization, second.utilization]),
        memory_mib=_highest(first.memory_mib, second.memory_mib),
        power_w=mean_of_known([first.power_w, second.power_w]),
        sm_mhz=mean_of_known([first.sm_mhz, second.sm_mhz]),
        celsius=mean_of_known([first.celsius, second.celsius]),
        throttle=reduce(or_, throttles) if throttles else None,
        pids=tuple(sorted(set[int]().union(*pids))) if pids else None,
        throttled=mean_of_known([first.throttled, second.throttled]),
        processes=_highest(first.processes, second.processes),
    )


def _highest(first: T | None, second: T | None) -> T | None:
    return max((value for value in (first, second) if value is not None), default=None)


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
