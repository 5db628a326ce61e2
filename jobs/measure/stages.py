"""Device time of a call by stage of the operator.

The times are the device's own timestamps of every kernel (CUPTI, through torch.profiler). Events around launches would
add microseconds to kernels that take as long, and would count the wait for a host that launches too slowly. The stages
thus add up to the time in which the device computed; the rest of the call's time is gaps. A kernel has the stage of its
launch. Kernels of one name are matched with launches in order, because the operator uses one stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jobs.hardware.stats import summarize
from jobs.measure.clock import l2_filler
from jobs.schema.point import Beat, Metric
from jobs.schema.quantities import STAGE
from nsa_core.kernels.runtime.launch import Started, observe

Profile = Counter[tuple[str, str]]  # nanoseconds by stage and kernel
OTHER = "other"  # PyTorch's own kernels: sorts, sums, copies
_METHOD = "device time of the stage's kernels in one call (CUPTI), L2 overwritten before it"


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel on the device; times in nanoseconds."""

    name: str
    start: int
    duration: int


class ProfileError(RuntimeError):
    """The profile does not match the launches. No stage is reported then, as times would be incomplete."""


@dataclass(frozen=True)
class Stages:
    """Metrics `stage_*` in ms, longest first, and a table of the times by kernel as text."""

    metrics: tuple[Metric, ...]
    text: str


def measure_stages(call: Callable[[], object], device: torch.device, runs: int, beat: Beat) -> Stages:
    """Profile `call`, which runs the project's kernels on a CUDA device and has run before, `runs` times.

    A process that has profiled may launch more slowly afterwards: time calls before, or in another one.

    Raises:
        ProfileError: none of the project's kernels ran, or the profiler did not see what was launched.
    """
    filler = l2_filler(device)
    _profile(call, device, filler)  # a process's first profile starts CUPTI, and may miss kernels
    profiles: list[Profile] = []
    for run in range(runs):
        beat("stages", run, runs)
        profiles.append(by_stage(*_profile(call, device, filler)))
    return summarize_stages(profiles)


def _profile(
    call: Callable[[], object], device: torch.device, filler: torch.Tensor
) -> tuple[list[Kernel], list[Started]]:
    """Kernels of one call, copies and fills included, and its launches."""
    filler.zero_()
    torch.cuda.synchronize(device)
    with observe() as launches, profile(activities=[ProfilerActivity.CUDA]) as watch:
        call()
        torch.cuda.synchronize(device)
    inner: Any = watch.profiler  # the events' accessors are not in PyTorch's type stubs
    events = (e for e in inner.kineto_results.events() if e.device_type() == DeviceType.CUDA)
    return [Kernel(e.name(), e.start_ns(), e.duration_ns()) for e in events if not e.is_user_annotation()], launches


def by_stage(kernels: Sequence[Kernel], launches: Sequence[Started]) -> Profile:
    """Time of the launched kernels by stage, and of all other kernels as OTHER.

    Raises:
        ProfileError: there is no launch, or kernels and launches do not match.
    """
    if not launches:
        raise ProfileError("none of the project's kernels ran; stages are those of backend triton on a GPU")
    waiting: dict[str, deque[str]] = {}
    for launch in launches:
        waiting.setdefault(launch.kernel, deque()).append(launch.stage)
    spent: Profile = Counter()
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stages = waiting.get(kernel.name)
        if stages is not None and not stages:
            raise ProfileError(f"the profile has {kernel.name} more often than it was launched")
        spent[stages.popleft() if stages else OTHER, kernel.name] += kernel.duration
    unseen = [name for name, stages in waiting.items() if stages]
    if unseen:
        raise ProfileError(f"the profile lacks launches of {', '.join(unseen)}; does CUPTI work here?")
    return spent


def summarize_stages(profiles: Sequence[Profile]) -> Stages:
    """Median over the profiles for every stage, longest first, and one line for each kernel as text."""
    names = {name: None for profiled in profiles for name, _ in profiled}
    samples = {
        name: [sum(ns for (stage, _), ns in profiled.items() if stage == name) / 1e6 for profiled in profiles]
        for name in names
    }
    metrics = [summarize(STAGE.named(name), times, _METHOD) for name, times in samples.items()]
    kernels = sorted(profiles[-1].items(), key=lambda item: -item[1])
    lines = [f"{ns / 1e6:10.4f} ms  {name:30} {kernel}" for (name, kernel), ns in kernels]
    return Stages(
        tuple(sorted(metrics, key=lambda metric: -metric.value)),
        "\n".join(["Device time of one call, by stage and kernel.", *lines, ""]),
    )
