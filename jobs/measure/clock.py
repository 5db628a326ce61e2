"""Wall time of a call: warm-up until steady, then repeated runs, of which every sample is kept.

CUDA: events around each call, with the L2 cache overwritten before it. Calls are queued in batches, so that launching
overlaps with running as in a training step; the host waits and reports progress once a batch.
CPU: the performance counter around each call.
"""

import gc
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from math import ceil
from statistics import median
from time import perf_counter  # bound here: what is timed cannot replace it
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator

from jobs.process.post_mortem import waited_s
from jobs.schema.point import REPEATED, REPEATING, TIMED, TIMING, Beat
from jobs.specs.fields import Count
from jobs.specs.spec import Strict

_STEADY_RUNS = 3  # number of last runs that decide whether warm-up has ended
_STEADY_SPREAD = 0.1  # highest relative difference of the slowest and the fastest of them
_BATCH_S = 0.2  # seconds of calls in a batch on CUDA
_LAUNCH_S = 30e-6  # of the host for a call, which overwriting L2 hides from a sample
_REPEATED_S, _LONGEST_S = 3.0, 10.0  # calls in a row that the parent times: by their samples, and at most


class TimingSpec(Strict):
    """Limits of a time measurement. Every sample taken is kept."""

    repeats: Count = Field(default=10, description="samples to take at least")
    min_s: float = Field(default=0.5, ge=0, description="seconds of samples to take at least")
    max_s: float = Field(
        default=20, gt=0, le=10**6, description="seconds after which sampling, or warming up, ends anyway"
    )
    warmup: Count = Field(default=10, description="runs after which warming up ends, steady or not")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_s > self.max_s:
            raise ValueError(f"min_s: {self.min_s:g}: sampling ends after max_s; use at most max_s = {self.max_s:g}")
        return self


class Timing(NamedTuple):
    """Samples in milliseconds, in the order taken, and a description of the measurement."""

    samples_ms: tuple[float, ...]
    method: str


def measure_time(
    call: Callable[[], Any],
    device: torch.device,
    plan: TimingSpec,
    beat: Beat,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Any], object] = lambda result: None,
    tries: int = 3,
) -> Timing:
    """Time `call`, which must do the same work each time.

    Args:
        before: called before each run, untimed; not between the calls in a row that `tries` is about.
        after: gets the result of a run, of a batch on CUDA the last one's, before the device is waited for.
        tries: times to measure, where other distributions' code is in the process, until calls in a row take less than
            three times as long as the samples: between both the host may get busy, or stop the process.

    Warming up ends when the last three runs differ by at most 10 %, or after `plan.warmup` runs or `plan.max_s`
    seconds. Garbage collection is off while sampling. The clock of the samples measures all of them together, too: the
    parent holds that, and the calls in a row, against its own, which nothing in this process can replace
    (jobs.process.child).
    """
    warmups: list[float] = []  # seconds
    steady = False
    while not warmups or not (steady or len(warmups) >= plan.warmup or sum(warmups) >= plan.max_s):
        beat("warm-up", len(warmups), plan.warmup)
        before()
        warmups.append(_timed(call, device, lambda result: None))
        last = warmups[-_STEADY_RUNS:]
        steady = len(last) == _STEADY_RUNS and max(last) <= min(last) * (1 + _STEADY_SPREAD)
    batch = max(1, min(plan.repeats, int(_BATCH_S / max(warmups[-1], 1e-6))))
    filler = l2_filler(device) if device.type == "cuda" else None
    samples: list[float] = []
    spent_ms = 0.0
    gc.collect()
    gc.disable()
    whole = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if filler is not None else []
    if whole:
        whole[0].record()
    begun = perf_counter()
    try:
        while not samples or (
            spent_ms < 1000 * plan.max_s and (len(samples) < plan.repeats or spent_ms < 1000 * plan.min_s)
        ):
            beat(TIMING, len(samples), plan.repeats)
            if filler is None:
                before()
                taken = [1000 * _timed(call, device, after)]
            else:
                taken = _batch_on_cuda(call, batch, filler, before, after)
            samples += taken
            spent_ms += sum(taken)
    finally:
        gc.enable()
    if whole:
        whole[1].record()
        synchronize(device)
    beat(TIMED, int(whole[0].elapsed_time(whole[1]) if whole else 1000 * (perf_counter() - begun)))
    each_s = median(samples) / 1000 + (_LAUNCH_S if filler is not None else 0)
    if not _credible_in_a_row(call, device, each_s, beat, last=tries == 1):
        return measure_time(call, device, plan, beat, before=before, after=after, tries=tries - 1)
    words = "steady" if steady else f"not steady within {_STEADY_SPREAD:.0%}"
    clock = "performance counter" if filler is None else "CUDA events, L2 overwritten before each run"
    return Timing(tuple(samples), f"{clock}; {len(warmups)} warm-up runs ({words}), {len(samples)} samples")


def _credible_in_a_row(
    call: Callable[[], Any], device: torch.device, each_s: float, beat: Beat, *, last: bool
) -> bool:  # fmt: skip
    """Whether calls in a row take less than three times `each_s` seconds each; the `last` try's are the parent's to
    judge. True, with none made, where no other distribution's code is in the process."""
    groups = ("implementations", "jobs", "peers")
    offers = (each for group in groups for each in entry_points(group=f"nsa_bench.{group}"))
    if not any(each.module in sys.modules for each in offers):
        return True
    done, waited, begun = 0, waited_s(os.getpid()), perf_counter()
    while done < ceil(_REPEATED_S / max(each_s, 1e-6)) and perf_counter() - begun < _LONGEST_S:
        beat(REPEATING, done)
        call()
        done += 1
    synchronize(device)
    took = perf_counter() - begun
    beat(TIMED, int(1000 * took))  # long enough to find a slow clock that few short samples do not show
    if not last and took - (waited_s(os.getpid()) - waited) > 3 * done * each_s:
        return False
    beat(REPEATED, int(1000 * done * each_s))
    return True


def _timed(call: Callable[[], Any], device: torch.device, after: Callable[[Any], object]) -> float:
    """Seconds of a run, whose result `after` gets."""
    start = perf_counter()
    result = call()
    synchronize(device)
    seconds = perf_counter() - start
    after(result)
    return seconds


def _batch_on_cuda(
    call: Callable[[], Any],
    batch: int,
    filler: torch.Tensor,
    before: Callable[[], object],
    after: Callable[[Any], object],
) -> list[float]:
    """Milliseconds of each call; all are queued before the host waits."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(batch)]
    for number, (start, end) in enumerate(pairs, 1):
        before()
        filler.zero_()
        start.record()
        result = call()
        end.record()
        if number == len(pairs):
            after(result)
        del result
    torch.cuda.synchronize(filler.device)
    return [start.elapsed_time(end) for start, end in pairs]


def l2_filler(device: torch.device) -> torch.Tensor:
    """A buffer twice as large as the L2 cache: overwriting it evicts everything else."""
    l2_bytes = max(int(torch.cuda.get_device_properties(device).L2_cache_size), 2**20)
    return torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
