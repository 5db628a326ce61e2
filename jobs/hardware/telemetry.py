"""GPU telemetry while a point runs, sampled from the parent process so that the measured process is not disturbed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import pynvml

from jobs.hardware import nvml
from jobs.hardware.gpu_samples import MOST, GpuSampler, Sample, bounded, mean_over, merged
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
_KEPT = 1000  # samples kept per metric; more are thinned evenly, as the metric's method states


@dataclass(frozen=True)
class TelemetrySummary:
    """Metrics (empty without samples), and a text with a table per GPU or the reason why there is none."""

    metrics: tuple[Metric, ...]
    text: str


class Telemetry:
    """Samples the GPUs of a point in a thread, about five times a second in its first hour, then less often.

    Args:
        gpu_ids: NVML indices ("0") or UUIDs ("GPU-..."); empty for a CPU point.
        period_s: seconds between samples; doubled whenever there are too many to keep.

    `start()` and `stop()` never raise if NVML is missing; the summary's text states the reason instead.
    """

    def __init__(self, gpu_ids: Sequence[str], period_s: float = 0.2) -> None:
        self._gpu_ids = [str(gpu) for gpu in gpu_ids]
        self._period_s = period_s
        self._samples: list[Sample] = []
        self._read = -1  # number of the last look that `readings` has told of
        self._problem: str | None = None if self._gpu_ids else "the point uses no GPU"
        self._stop = threading.Event()
        self._paused = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._problem is not None:
            return
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> TelemetrySummary:
        """End the sampling and summarize it; a second call gives the same summary."""
        stop_all([self])
        if not self._samples:
            return TelemetrySummary((), f"No GPU telemetry: {self._problem or 'no sample was taken'}.\n")
        return summarise_samples(list(self._samples), self._problem)

    def ask_to_stop(self) -> None:
        self._stop.set()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until the sampling has ended, once it was asked to."""
        if self._thread is not None:
            self._thread.join(timeout)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no samples within the block, which does something else than what is measured."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @property
    def samples(self) -> list[Sample]:
        """The samples so far, in the order of time."""
        return list(self._samples)

    def readings(self) -> list[Reading]:
        """Utilisation, power and clock (means) and memory (highest) of each GPU since the last call, by rank.

        A GPU's rank is its place among the point's GPUs.
        """
        samples = self._samples
        first = bisect_right(samples, self._read, key=lambda sample: sample.number)
        new = samples[first:]
        self._read = new[-1].number if new else self._read
        return [
            _reading(rank, mine)
            for rank, gpu in enumerate(self._gpu_ids)
            if (mine := [sample for sample in new if sample.gpu == gpu])
        ]

    def _run(self) -> None:
        try:
            with nvml.session():
                samplers = [GpuSampler(gpu) for gpu in dict.fromkeys(self._gpu_ids)]
                weight = 1
                for number in count():
                    now = time.monotonic()
                    if self._paused:
                        for sampler in samplers:
                            sampler.pause()
                    else:
                        self._samples.extend([sampler.sample(number, now, weight) for sampler in samplers])
                    if len(self._samples) > MOST * len(samplers):
                        self._period_s *= 2
                        weight *= 2
                        self._samples = merged(self._samples, weight)  # another list: `readings` may read the old one
                    if self._stop.wait(self._period_s):
                        return
        except (nvml.NvmlError, pynvml.NVMLError) as err:
            self._problem = str(err)


def stop_all(telemetries: Sequence[Telemetry]) -> None:
    """End the sampling of all, as fast as that of one: a driver that is stuck holds up each of them."""
    for telemetry in telemetries:
        telemetry.ask_to_stop()
    deadline = time.monotonic() + _STOP_S
    for telemetry in telemetries:
        telemetry.join(max(0.0, deadline - time.monotonic()))


def _reading(rank: int, samples: Sequence[Sample]) -> Reading:
    """Reading of one GPU's samples."""
    found = {
        GPU_UTILIZATION: mean_over(samples, lambda sample: sample.utilization),
        GPU_POWER: mean_over(samples, lambda sample: sample.power_w),
        GPU_SM_CLOCK: mean_over(samples, lambda sample: sample.sm_mhz),
        GPU_MEMORY_USED: max((sample.memory_mib for sample in samples if sample.memory_mib is not None), default=None),
    }
    values = {quantity: value for quantity, value in found.items() if value is not None}
    return Reading(rank, samples[-1].number, time.time(), values)


def summarise_samples(samples: Sequence[Sample], problem: str | None = None) -> TelemetrySummary:
    """Metrics over all samples of all GPUs, each by the time that it stands for, and a table per GPU as text."""
    samples = sorted(bounded(samples), key=lambda sample: sample.gpu)  # else every nth could be of one GPU alone
    metrics = [
        _metric(GPU_UTILIZATION, [s.utilization for s in samples]),
        _metric(GPU_POWER, [s.power_w for s in samples]),
        _metric(GPU_SM_CLOCK, [s.sm_mhz for s in samples]),
        _metric(GPU_TEMPERATURE, [s.celsius for s in samples]),
        _peak(GPU_MEMORY_USED, [s.memory_mib for s in samples]),
        _peak(GPU_PROCESSES, [s.processes for s in samples]),
    ]
    if (share := mean_over(samples, lambda s: s.throttled)) is not None:
        metrics.append(Metric.of(GPU_THROTTLED, 100 * share, method="share of NVML samples with a throttle"))
    if (joules := energy(samples)) is not None:
        method = "integral of the NVML samples of power while the point held its GPUs, all of them, start-up included"
        metrics.append(Metric.of(GPU_ENERGY, joules, method=method))
    return TelemetrySummary(tuple(m for m in metrics if m is not None), _text(samples, problem))


def _metric(quantity: Quantity, values: Sequence[float | None]) -> Metric | None:
    known = [float(v) for v in values if v is not None]
    if not known:
        return None
    step = -(-len(known) // _KEPT)
    thinned = f", every {step}th of {len(known)} kept" if step > 1 else ""
    return summarize(quantity, known[::step], f"NVML samples while the point ran, start-up included{thinned}")


def energy(samples: Sequence[Sample]) -> float | None:
    """Energy [J] of all GPUs while they were sampled; None without two samples in a row."""
    joules = [sample.joules for sample in samples if sample.joules is not None]
    return sum(joules) if joules else None


def _peak(quantity: Quantity, values: Sequence[float | None]) -> Metric | None:
    known = [float(v) for v in values if v is not None]
    method = "highest of the NVML samples while the point ran"
    return Metric.of(quantity, max(known), method=method) if known else None


def _throttles(samples: Sequence[Sample]) -> str:
    """The share of the time with a throttle, and the reasons, in words."""
    reasons = [name for bit, name in nvml.THROTTLES.items() if any((s.throttle or 0) & bit for s in samples)]
    share = mean_over(samples, lambda s: s.throttled) or 0.0
    return f"{100 * share:.3g} % of the looks; clocks held by: {', '.join(reasons)}" if reasons else "never"


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
            known = [v for v in values if v is not None]
            if known:
                mean = sum(known) / len(known)
                lines.append(f"  {title:12} min {min(known):.0f}  mean {mean:.0f}  max {max(known):.0f} {unit}")
        lines.append(f"  throttled    {_throttles(mine)}")
        pids = sorted({pid for s in mine for pid in s.pids or ()})
        lines.append("  processes    " + (" ".join(map(str, pids)) or "none listed"))
    if problem:
        lines.append(f"Sampling ended early: {problem}.")
    return "\n".join(lines) + "\n"
