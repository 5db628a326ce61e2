"""A point's GPUs or processes while it runs, sampled from the parent so that the measured process is not disturbed."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import numpy as np
import psutil
import pynvml

from jobs.hardware import nvml
from jobs.hardware.stats import summarize
from jobs.schema import quantities
from jobs.schema.point import Metric, Samples
from jobs.schema.quantities import Quantity

_STOP_S = 10.0  # for the look that a sampling is at
_KEPT = 1000  # samples kept per metric; of more, as many evenly in time
_LEAST_S = 0.2  # between two readings of processor time, which the kernel counts in steps of 10 ms
_FULL_RATE = 10_000  # samples of a GPU, after which their number grows with the logarithm of time


@dataclass(frozen=True, slots=True)
class Sample:
    """State of one GPU at a look."""

    gpu: str
    number: int  # of the look at all GPUs, from 0
    seconds: float  # since the look before; 0 of the first one, and after a pause
    values: Mapping[Quantity, float]  # those that the driver reports; energy is that since the power was last known
    throttle: int = 0  # bit mask of all reasons
    pids: tuple[int, ...] = ()  # of all processes


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
        device, ask = self._device, nvml.ask
        found = {
            quantities.GPU_UTILIZATION: ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu),
            quantities.GPU_MEMORY_USED: ask(lambda: int(pynvml.nvmlDeviceGetMemoryInfo(device).used) / 2**20),
            quantities.GPU_POWER: ask(lambda: pynvml.nvmlDeviceGetPowerUsage(device) / 1000),
            quantities.GPU_SM_CLOCK: ask(lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)),
            quantities.GPU_TEMPERATURE: ask(
                lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)
            ),
        }
        if (pids := ask(lambda: nvml.compute_pids(device))) is not None:
            found[quantities.GPU_PROCESSES] = len(pids)
        if (reasons := ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))) is not None:
            found[quantities.GPU_THROTTLED] = 100 * bool(reasons & self._throttles)
        if (watts := found[quantities.GPU_POWER]) is not None:
            before, self._power = self._power, (clock, watts)
            if before is not None:
                found[quantities.GPU_ENERGY] = (before[1] + watts) / 2 * (clock - before[0])  # trapezoidal rule
        since, self._looked = self._looked, clock
        values = {quantity: float(value) for quantity, value in found.items() if value is not None}
        seconds = 0.0 if since is None else clock - since
        return Sample(self._gpu, number, seconds, values, reasons or 0, tuple(pids or ()))


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

    def readings(self) -> list[Samples]:
        """Means (memory: the highest) of each GPU since the last call; its rank is its place among the point's GPUs."""
        new = self.samples[bisect_right(self.samples, self._read, key=lambda sample: sample.number) :]
        found = []
        for rank, gpu in enumerate(self._gpu_ids):
            if mine := [sample for sample in new if sample.gpu == gpu]:
                self._read = new[-1].number
                values: dict[Quantity, float] = {}
                for quantity in quantities.LIVE:
                    if known := _known(mine, quantity):
                        values[quantity] = max(known) if quantity is quantities.GPU_MEMORY_USED else fmean(known)
                found.append(_of_now(rank, mine[-1].number, values))
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


def _known(samples: Sequence[Sample], quantity: Quantity) -> list[float]:
    return [sample.values[quantity] for sample in samples if quantity in sample.values]


def summarise_samples(samples: Sequence[Sample], problem: str | None = None) -> TelemetrySummary:
    """Metrics over all samples of all GPUs, each by the time that it stands for, and a table per GPU as text."""
    samples = sorted(samples, key=lambda sample: sample.gpu)  # stable: in the order of time within a GPU
    metrics: list[Metric] = []
    for quantity in quantities.GPU_LEVELS:
        known = [sample for sample in samples if quantity in sample.values]
        values, method = np.array(_known(known, quantity)), "NVML samples while the point ran, start-up included"
        if len(known) > _KEPT:  # a long point is sampled less often towards its end
            ends = np.cumsum([sample.seconds for sample in known])
            values = values[np.searchsorted(ends, np.linspace(ends[0], ends[-1], _KEPT))]
            method += f", {_KEPT} of {len(known)} kept, evenly in time"
        if known:
            metrics.append(summarize(quantity, values.tolist(), method))
    method = "highest of the NVML samples while the point ran"
    for quantity in (quantities.GPU_MEMORY_USED, quantities.GPU_PROCESSES):
        if highest := _known(samples, quantity):
            metrics.append(Metric.of(quantity, max(highest), method=method))
    if (share := _throttled(samples)) is not None:
        metrics.append(Metric.of(quantities.GPU_THROTTLED, share, method="share of NVML samples with a throttle"))
    if joules := _known(samples, quantities.GPU_ENERGY):
        method = "integral of the NVML samples of power while the point held its GPUs, all of them, start-up included"
        metrics.append(Metric.of(quantities.GPU_ENERGY, sum(joules), method=method))
    return TelemetrySummary(tuple(metrics), _text(samples, problem))


def _throttled(samples: Sequence[Sample]) -> float | None:
    """Share of the time with a throttle [%]; None if it is not known."""
    known = [sample for sample in samples if quantities.GPU_THROTTLED in sample.values]
    seconds, on = [s.seconds or 1e-9 for s in known], _known(known, quantities.GPU_THROTTLED)
    return 100 * (sum(s for s, share in zip(seconds, on, strict=True) if share) / sum(seconds)) if known else None


def _text(samples: Sequence[Sample], problem: str | None) -> str:
    lines = []
    for gpu in dict.fromkeys(s.gpu for s in samples):
        mine = [s for s in samples if s.gpu == gpu]
        lines.append(f"GPU {gpu}: {len(mine)} samples over {sum(s.seconds for s in mine):.1f} s")
        for quantity in (*quantities.GPU_LEVELS, quantities.GPU_MEMORY_USED):
            if known := _known(mine, quantity):
                spread = f"min {min(known):.0f}  mean {fmean(known):.0f}  max {max(known):.0f} {quantity.unit}"
                lines.append(f"  {quantity.title:22}  {spread}")
        reasons = [name for bit, name in nvml.THROTTLES.items() if any(s.throttle & bit for s in mine)]
        share = f"{_throttled(mine) or 0:.3g} % of the time; clocks held by: {', '.join(reasons)}"
        pids = sorted({pid for s in mine for pid in s.pids})
        lines.append(f"  {'Throttled':22}  {share if reasons else 'never'}")
        lines.append(f"  {'Processes':22}  {' '.join(map(str, pids)) or 'none listed'}")
    if problem:
        lines.append(f"Sampling ended early: {problem}.")
    return "\n".join(lines) + "\n"


def _of_now(rank: int, number: int, values: Mapping[Quantity, float]) -> Samples:
    units = {quantity.name: quantity.unit for quantity in values}
    return Samples(rank, number, time.time(), {quantity.name: value for quantity, value in values.items()}, units)


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

    def readings(self) -> list[Samples]:
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
            values = {quantities.CPU_UTILIZATION: share, quantities.RESIDENT_MEMORY: resident / 2**20}
            found.append(_of_now(rank, self._number, values))
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
