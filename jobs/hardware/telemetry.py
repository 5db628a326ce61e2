"""A point's GPUs or processes while it runs, sampled from the parent so that the measured process is not disturbed."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import numpy as np
import psutil
import pynvml

from jobs.hardware import nvml
from jobs.hardware.stats import summarize
from jobs.schema.point import Metric, Reading
from jobs.schema.quantities import (
    CPU_UTILIZATION,
    GPU_ENERGY,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_PROCESSES,
    GPU_SM_CLOCK,
    GPU_TEMPERATURE,
    GPU_THROTTLED,
    GPU_UTILIZATION,
    RESIDENT_MEMORY,
    Quantity,
)

_STOP_S = 10.0  # for the look that a sampling is at
_KEPT = 1000  # samples kept per metric; of more, as many evenly in time
_LEAST_S = 0.2  # between two readings of processor time, which the kernel counts in steps of 10 ms
_FULL_RATE = 10_000  # samples of a GPU, after which their number grows with the logarithm of time


@dataclass(frozen=True, slots=True)
class Sample:
    """State of one GPU at a look; None for values that the driver does not report."""

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
    throttled: bool | None = None  # whether its clock is lowered against its will
    joules: float | None = None  # since the power was last known; None of the first look, and after a pause


class GpuSampler:
    """Takes the samples of one GPU. Raises NvmlError if there is no such GPU."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._device = nvml.handle(gpu)
        self._throttles = nvml.throttles(self._device)
        self.pause()

    def pause(self) -> None:
        """Leave out the time until the next sample."""
        self._looked: float | None = None
        self._power: tuple[float, float] | None = None  # time at which it was last known, and watts

    def sample(self, number: int, clock: float) -> Sample:
        """Sample of now, which is `clock` in seconds."""
        device = self._device
        memory = nvml.ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(device).used)
        power = nvml.ask(lambda: pynvml.nvmlDeviceGetPowerUsage(device) / 1000)
        throttle = nvml.ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))
        pids = nvml.ask(lambda: nvml.compute_pids(device))
        since, self._looked = self._looked, clock
        joules = None
        if power is not None:
            before, self._power = self._power, (clock, power)
            joules = None if before is None else (before[1] + power) / 2 * (clock - before[0])  # trapezoidal rule
        return Sample(
            gpu=self._gpu,
            number=number,
            seconds=0.0 if since is None else clock - since,
            utilization=nvml.ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu),
            memory_mib=None if memory is None else int(memory) / 2**20,
            power_w=power,
            sm_mhz=nvml.ask(lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)),
            celsius=nvml.ask(lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
            throttle=throttle,
            throttled=None if throttle is None else bool(throttle & self._throttles),
            pids=None if pids is None else tuple(pids),
            joules=joules,
        )


class Telemetry:
    """Samples the GPUs of a point in a thread, about five times a second for half an hour, then less often.

    `gpu_ids` are NVML indices ("0") or UUIDs ("GPU-..."), none for a CPU point; `period_s` is between samples at first.
    Nothing raises if NVML is missing; the summary's text states the reason instead.
    """

    def __init__(self, gpu_ids: Sequence[str], period_s: float = 0.2) -> None:
        self.samples: list[Sample] = []  # those so far, in the order of time
        self.stopping = threading.Event()  # set: no further samples
        self.thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._gpu_ids = [str(gpu) for gpu in gpu_ids]
        self._period_s = period_s
        self._read = -1  # number of the last look that `readings` has reported
        self._problem: str | None = None if self._gpu_ids else "the point uses no GPU"
        self._paused = False

    def start(self) -> None:
        if self._problem is None:
            self.thread.start()

    def stop(self) -> TelemetrySummary:
        """End the sampling and summarize it; a second call gives the same summary."""
        stop_all([self])
        if not self.samples:
            return TelemetrySummary((), f"No GPU telemetry: {self._problem or 'no sample was taken'}.\n")
        return summarise_samples(list(self.samples), self._problem)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take no samples within the block, which does something else than what is measured."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def readings(self) -> list[Reading]:
        """Means (memory: the highest) of each GPU since the last call; its rank is its place among the point's GPUs."""
        new = self.samples[bisect_right(self.samples, self._read, key=lambda sample: sample.number) :]
        found = []
        for rank, gpu in enumerate(self._gpu_ids):
            if mine := [sample for sample in new if sample.gpu == gpu]:
                self._read = new[-1].number
                values: dict[Quantity, float] = {}
                for quantity in (GPU_UTILIZATION, GPU_POWER, GPU_SM_CLOCK, GPU_MEMORY_USED):
                    if known := _known(mine, quantity):
                        values[quantity] = max(known) if quantity is GPU_MEMORY_USED else fmean(known)
                found.append(Reading(rank, mine[-1].number, time.time(), values))
        return found

    def _run(self) -> None:
        try:
            with nvml.session():
                samplers = [GpuSampler(gpu) for gpu in dict.fromkeys(self._gpu_ids)]
                begun = time.monotonic()
                for number in count():
                    now = time.monotonic()
                    if self._paused:
                        for sampler in samplers:
                            sampler.pause()
                    else:
                        self.samples.extend([sampler.sample(number, now) for sampler in samplers])
                    if self.stopping.wait(max(self._period_s, (now - begun) / _FULL_RATE)):
                        return
        except (nvml.NvmlError, pynvml.NVMLError) as err:
            self._problem = str(err)


def stop_all(telemetries: Sequence[Telemetry]) -> None:
    """End the sampling of all, as fast as that of one: a driver that is stuck holds up each of them."""
    for telemetry in telemetries:
        telemetry.stopping.set()
    deadline = time.monotonic() + _STOP_S
    for telemetry in telemetries:
        if telemetry.thread.is_alive():
            telemetry.thread.join(max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True)
class TelemetrySummary:
    """Metrics (empty without samples), and a text with a table per GPU or the reason why there is none."""

    metrics: tuple[Metric, ...]
    text: str


# Quantities in the order of the table, each with its field of a sample and its title.
_FIELDS = {
    GPU_UTILIZATION: ("utilization", "utilisation"),
    GPU_MEMORY_USED: ("memory_mib", "memory used"),
    GPU_POWER: ("power_w", "power"),
    GPU_SM_CLOCK: ("sm_mhz", "SM clock"),
    GPU_TEMPERATURE: ("celsius", "temperature"),
}


def _known(samples: Sequence[Sample], quantity: Quantity) -> list[float]:
    values = [getattr(sample, _FIELDS[quantity][0]) for sample in samples]
    return [float(value) for value in values if value is not None]


def summarise_samples(samples: Sequence[Sample], problem: str | None = None) -> TelemetrySummary:
    """Metrics over all samples of all GPUs, each by the time that it stands for, and a table per GPU as text."""
    samples = sorted(samples, key=lambda sample: sample.gpu)  # stable: in the order of time within a GPU
    metrics: list[Metric] = []
    for quantity in (GPU_UTILIZATION, GPU_POWER, GPU_SM_CLOCK, GPU_TEMPERATURE):
        known = [sample for sample in samples if getattr(sample, _FIELDS[quantity][0]) is not None]
        values, method = np.array(_known(known, quantity)), "NVML samples while the point ran, start-up included"
        if len(known) > _KEPT:  # a long point is sampled less often towards its end
            ends = np.cumsum([sample.seconds for sample in known])
            values = values[np.searchsorted(ends, np.linspace(ends[0], ends[-1], _KEPT))]
            method += f", {_KEPT} of {len(known)} kept, evenly in time"
        if known:
            metrics.append(summarize(quantity, values.tolist(), method))
    method = "highest of the NVML samples while the point ran"
    processes = [float(len(sample.pids)) for sample in samples if sample.pids is not None]
    for quantity, highest in ((GPU_MEMORY_USED, _known(samples, GPU_MEMORY_USED)), (GPU_PROCESSES, processes)):
        if highest:
            metrics.append(Metric.of(quantity, max(highest), method=method))
    if (share := _throttled(samples)) is not None:
        metrics.append(Metric.of(GPU_THROTTLED, share, method="share of NVML samples with a throttle"))
    if joules := [sample.joules for sample in samples if sample.joules is not None]:
        method = "integral of the NVML samples of power while the point held its GPUs, all of them, start-up included"
        metrics.append(Metric.of(GPU_ENERGY, sum(joules), method=method))
    return TelemetrySummary(tuple(metrics), _text(samples, problem))


def _throttled(samples: Sequence[Sample]) -> float | None:
    """Share of the time with a throttle [%]; None if it is not known."""
    looks = [(s.throttled, s.seconds or 1e-9) for s in samples if s.throttled is not None]
    return 100 * (sum(on * weight for on, weight in looks) / sum(weight for _, weight in looks)) if looks else None


def _text(samples: Sequence[Sample], problem: str | None) -> str:
    lines = []
    for gpu in dict.fromkeys(s.gpu for s in samples):
        mine = [s for s in samples if s.gpu == gpu]
        lines.append(f"GPU {gpu}: {len(mine)} samples over {sum(s.seconds for s in mine):.1f} s")
        for quantity, (_, title) in _FIELDS.items():
            if known := _known(mine, quantity):
                spread = f"min {min(known):.0f}  mean {fmean(known):.0f}  max {max(known):.0f} {quantity.unit}"
                lines.append(f"  {title:12} {spread}")
        reasons = [name for bit, name in nvml.THROTTLES.items() if any((s.throttle or 0) & bit for s in mine)]
        share = f"{_throttled(mine) or 0:.3g} % of the time; clocks held by: {', '.join(reasons)}"
        pids = sorted({pid for s in mine for pid in s.pids or ()})
        lines += [f"  throttled    {share if reasons else 'never'}"]
        lines += ["  processes    " + (" ".join(map(str, pids)) or "none listed")]
    if problem:
        lines.append(f"Sampling ended early: {problem}.")
    return "\n".join(lines) + "\n"


class ProcessUsage:
    """Usage of process trees between one reading and the next: of the point's, as rank 0, or of each of its ranks'.

    `pids` are the roots of the trees, by rank; `cores` those of each, 100 % of which is all of them busy.
    """

    def __init__(self, pids: Sequence[int], cores: float) -> None:
        self._cores = cores
        self._number = 0
        self._before = {pid: (time.monotonic(), _usage(pid)[0]) for pid in pids}

    def follow(self, pids: Sequence[int]) -> None:
        """Read from now on the trees of these processes, which share the cores."""
        self._cores = max(1.0, self._cores // len(pids))
        self._before = {pid: (time.monotonic(), _usage(pid)[0]) for pid in pids}

    def readings(self) -> list[Reading]:
        """Utilisation since the last reading, and the present resident memory, of each tree that is still there."""
        self._number += 1
        found = []
        for rank, (pid, (since, before)) in enumerate(self._before.items()):
            clock = time.monotonic()
            if clock - since < _LEAST_S:
                continue
            seconds, resident = _usage(pid)
            if not resident:  # they have ended, even if nobody has reaped them yet
                continue
            self._before[pid] = clock, seconds
            share = 100 * max(0.0, seconds - before) / (clock - since) / self._cores
            values = {CPU_UTILIZATION: share, RESIDENT_MEMORY: resident / 2**20}
            found.append(Reading(rank, self._number, time.time(), values))
        return found


def _usage(pid: int) -> tuple[float, int]:
    """Processor seconds of a process, its descendants and their ended children; resident bytes of the living ones."""
    seconds, resident = 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                seconds += times.user + times.system
                seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
                resident += process.memory_info().rss
    return seconds, resident
