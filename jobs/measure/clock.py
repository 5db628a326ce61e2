"""Wall time of a call: warm-up until steady, then repeated runs, of which every sample is kept.

CUDA: events around each call, with the L2 cache overwritten before it. Calls are queued in batches, so that launching
overlaps with running as in a training step; the host waits and reports progress once a batch.
CPU: the performance counter around each call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from jobs.schema.point import Beat

_STEADY_RUNS = 3  # number of last runs that decide whether warm-up has ended
_STEADY_SPREAD = 0.1  # highest relative difference of the slowest and the fastest of them
_BATCH_S = 0.2  # seconds of calls in a batch on CUDA


@dataclass(frozen=True)
class TimingPlan:
    """Limits of a time measurement.

    Attributes:
        repeats: least number of samples.
        min_s: least sum of the samples in seconds.
        max_s: sum of the samples in seconds after which sampling ends anyway, with at least one sample.
        warmup: runs after which warming up ends, steady or not.
    """

    repeats: int
    min_s: float
    max_s: float
    warmup: int


@dataclass(frozen=True)
class Timing:
    """Samples in milliseconds, in the order taken, and a description of the measurement."""

    samples_ms: tuple[float, ...]
    method: str


def measure_time(call: Callable[[], object], device: torch.device, plan: TimingPlan, beat: Beat) -> Timing:
    """Time `call`, which must do the same work each time.

    Warming up ends when the last three runs differ by at most 10 %, or after `plan.warmup` runs or `plan.max_s`
    seconds. Garbage collection is off while sampling.
    """
    warmups = _warm_up(call, device, plan, beat)
    with _no_gc():
        samples = (_sample_cuda if device.type == "cuda" else _sample_cpu)(call, device, plan, warmups, beat)
    steady = "steady" if _is_steady(warmups) else f"not steady within {_STEADY_SPREAD:.0%}"
    clock = "CUDA events, L2 overwritten before each run" if device.type == "cuda" else "performance counter"
    return Timing(tuple(samples), f"{clock}; {len(warmups)} warm-up runs ({steady}), {len(samples)} samples")


def _warm_up(call: Callable[[], object], device: torch.device, plan: TimingPlan, beat: Beat) -> list[float]:
    """Seconds of each warm-up run."""
    runs: list[float] = []
    while not runs or not (_is_steady(runs) or len(runs) >= plan.warmup or sum(runs) >= plan.max_s):
        beat("warm-up", len(runs), plan.warmup)
        start = time.perf_counter()
        call()
        synchronize(device)
        runs.append(time.perf_counter() - start)
    return runs


def _is_steady(runs: list[float]) -> bool:
    last = runs[-_STEADY_RUNS:]
    return len(last) == _STEADY_RUNS and max(last) <= min(last) * (1 + _STEADY_SPREAD)


def _enough(samples_ms: list[float], plan: TimingPlan) -> bool:
    spent = sum(samples_ms) / 1000
    return bool(samples_ms) and (spent >= plan.max_s or (len(samples_ms) >= plan.repeats and spent >= plan.min_s))


def _sample_cpu(
    call: Callable[[], object], device: torch.device, plan: TimingPlan, warmups: list[float], beat: Beat
) -> list[float]:
    samples: list[float] = []
    while not _enough(samples, plan):
        beat("time", len(samples), plan.repeats)
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1000)
    return samples


def _sample_cuda(
    call: Callable[[], object], device: torch.device, plan: TimingPlan, warmups: list[float], beat: Beat
) -> list[float]:
    batch = max(1, min(plan.repeats, int(_BATCH_S / max(warmups[-1], 1e-6))))
    flush = l2_filler(device)
    samples: list[float] = []
    while not _enough(samples, plan):
        beat("time", len(samples), plan.repeats)
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(batch)]
        for start, end in pairs:
            flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        samples.extend(start.elapsed_time(end) for start, end in pairs)
    return samples


def l2_filler(device: torch.device) -> torch.Tensor:
    """A buffer twice as large as the L2 cache: overwriting it evicts everything else."""
    l2_bytes = max(int(torch.cuda.get_device_properties(device).L2_cache_size), 2**20)
    return torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _no_gc() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
