"""GPU telemetry while a point runs, sampled from the parent process so that the measured process is not disturbed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import numpy as np
import pynvml

from jobs.hardware import nvml
from jobs.hardware.stats import summarize
from jobs.schema.point import Metric, Reading
from jobs.schema.quantities import (
    GPU_ENERGY,
    GPU_MEMORY_USED,
    GPU_POWER,
    GPU_PROCESSES,
    GPU_SM_CLOCK,
    GPU_TEMPERATURE,
    GPU_THROTTLED,
    GPU_UTILIZATION,
    Quantity,
)

_STOP_S = 10.0  # for the look that a sampling is at
_KEPT = 1000  # samples kept per metric; of more, as many evenly in time
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


@dataclass(frozen=True)
class TelemetrySummary:
    """Metrics (empty without samples), and a text with a table per GPU or the reason why there is none."""

    metrics: tuple[Metric, ...]
    text: str


class Telemetry:
    """Samples the GPUs of a point in a thread, about five times a second for half an hour, then less often.

    Args:
        gpu_ids: NVML indices ("0") or UUIDs ("GPU-..."); empty for a CPU point.
        period_s: seconds between samples at first.

    `start()` and `stop()` never raise if NVML is missing; the summary's text states the reason instead.
    """

    def __init__(self, gpu_ids: Sequence[str], period_s: float = 0.2) -> None:
        self.samples: list[Sample] = []  # those so far, in the order of time
        self._gpu_ids = [str(gpu) for gpu in gpu_ids]
        self._period_s = period_s
        self._read = -1  # number of the last look that `readings` has reported
        self._problem: str | None = None if self._gpu_ids else "the point uses no GPU"
        self._stop = threading.Event()
        self._paused = False
        self.thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        if self._problem is None:
            self.thread.start()

    def stop(self) -> TelemetrySummary:
        """End the sampling and summarize it; a second call gives the same summary."""
        stop_all([self])
        if not self.samples:
            return TelemetrySummary((), f"No GPU telemetry: {self._problem or 'no sample was taken'}.\n")
        return summarise_samples(list(self.samples), self._problem)

    def ask_to_stop(self) -> None:
        self._stop.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no samples within the block, which does something else than what is measured."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def readings(self) -> list[Reading]:
        """Utilisation, power and clock (means) and memory (highest) of each GPU since the last call, by rank.

        A GPU's rank is its place among the point's GPUs.
        """
        new = self.samples[bisect_right(self.samples, self._read, key=lambda sample: sample.number) :]
        if not new:
            return []
        self._read = new[-1].number
        found = []
        for rank, gpu in enumerate(self._gpu_ids):
            values: dict[Quantity, float] = {}
            mine = [sample for sample in new if sample.gpu == gpu]
            for quantity, condense, samples in (
                (GPU_UTILIZATION, fmean, [s.utilization for s in mine]),
                (GPU_POWER, fmean, [s.power_w for s in mine]),
                (GPU_SM_CLOCK, fmean, [s.sm_mhz for s in mine]),
                (GPU_MEMORY_USED, max, [s.memory_mib for s in mine]),
            ):
                if known := [value for value in samples if value is not None]:
                    values[quantity] = condense(known)
            found += [Reading(rank, mine[-1].number, time.time(), values)] if mine else []
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
                    if self._stop.wait(max(self._period_s, (now - begun) / _FULL_RATE)):
                        return
        except (nvml.NvmlError, pynvml.NVMLError) as err:
            self._problem = str(err)


def stop_all(telemetries: Sequence[Telemetry]) -> None:
    """End the sampling of all, as fast as that of one: a driver that is stuck holds up each of them."""
    for telemetry in telemetries:
        telemetry.ask_to_stop()
    deadline = time.monotonic() + _STOP_S
    for telemetry in telemetries:
        if telemetry.thread.is_alive():
            telemetry.thread.join(max(0.0, deadline - time.monotonic()))


def summarise_samples(samples: Sequence[Sample], problem: str | None = None) -> TelemetrySummary:
    """Metrics over all samples of all GPUs, each by the time that it stands for, and a table per GPU as text."""
    samples = sorted(samples, key=lambda sample: sample.gpu)  # stable: in the order of time within a GPU
    metrics = [
        _metric(GPU_UTILIZATION, samples, lambda s: s.utilization),
        _metric(GPU_POWER, samples, lambda s: s.power_w),
        _metric(GPU_SM_CLOCK, samples, lambda s: s.sm_mhz),
        _metric(GPU_TEMPERATURE, samples, lambda s: s.celsius),
        _peak(GPU_MEMORY_USED, [s.memory_mib for s in samples]),
        _peak(GPU_PROCESSES, [None if s.pids is None else len(s.pids) for s in samples]),
    ]
    if (share := _throttled(samples)) is not None:
        metrics.append(Metric.of(GPU_THROTTLED, share, method="share of NVML samples with a throttle"))
    if (joules := energy(samples)) is not None:
        method = "integral of the NVML samples of power while the point held its GPUs, all of them, start-up included"
        metrics.append(Metric.of(GPU_ENERGY, joules, method=method))
    return TelemetrySummary(tuple(m for m in metrics if m is not None), _text(samples, problem))


def energy(samples: Sequence[Sample]) -> float | None:
    """Energy [J] of all GPUs while they were sampled; None without two samples in a row."""
    joules = [sample.joules for sample in samples if sample.joules is not None]
    return sum(joules) if joules else None


def _metric(quantity: Quantity, samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> Metric | None:
    known = [(sample.seconds, float(v)) for sample in samples if (v := value(sample)) is not None]
    if not known:
        return None
    seconds, values = np.array(known).T
    method = "NVML samples while the point ran, start-up included"
    if len(values) > _KEPT:  # a long point is sampled less often towards its end
        ends = np.cumsum(seconds)
        values = values[np.searchsorted(ends, np.linspace(ends[0], ends[-1], _KEPT))]
        method += f", {_KEPT} of {len(known)} kept, evenly in time"
    return summarize(quantity, values.tolist(), method)


def _peak(quantity: Quantity, values: Sequence[float | None]) -> Metric | None:
    known = [float(v) for v in values if v is not None]
    method = "highest of the NVML samples while the point ran"
    return Metric.of(quantity, max(known), method=method) if known else None


def _throttled(samples: Sequence[Sample]) -> float | None:
    """Share of the time with a throttle [%]; None if it is not known."""
    looks = [(s.throttled, s.seconds or 1e-9) for s in samples if s.throttled is not None]
    return 100 * (sum(on * weight for on, weight in looks) / sum(weight for _, weight in looks)) if looks else None


def _text(samples: Sequence[Sample], problem: str | None) -> str:
    lines = []
    for gpu in dict.fromkeys(s.gpu for s in samples):
        mine = [s for s in samples if s.gpu == gpu]
        lines.append(f"GPU {gpu}: {len(mine)} samples over {sum(s.seconds for s in mine):.1f} s")
        for title, unit, values in (
            ("utilisation", "%", [s.utilization for s in mine]),
            ("memory used", "MiB", [s.memory_mib for s in mine]),
            ("power", "W", [s.power_w for s in mine]),
            ("SM clock", "MHz", [s.sm_mhz for s in mine]),
            ("temperature", "C", [s.celsius for s in mine]),
        ):
            if known := [v for v in values if v is not None]:
                lines.append(f"  {title:12} min {min(known):.0f}  mean {fmean(known):.0f}  max {max(known):.0f} {unit}")
        reasons = [name for bit, name in nvml.THROTTLES.items() if any((s.throttle or 0) & bit for s in mine)]
        share = (
            f"{_throttled(mine) or 0:.3g} % of the time; clocks held by: {', '.join(reasons)}" if reasons else "never"
        )
        pids = sorted({pid for s in mine for pid in s.pids or ()})
        lines += [f"  throttled    {share}", "  processes    " + (" ".join(map(str, pids)) or "none listed")]
    if problem:
        lines.append(f"Sampling ended early: {problem}.")
    return "\n".join(lines) + "\n"
