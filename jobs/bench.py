"""The operator against dense attention and the recorded peers: time, memory and stages over head layouts and lengths.

The timed call is the whole operator, from q, k, v and gate logits to the gated sum, at a fixed number of tokens, as for
the peers in orchestrator/reference_data. Times are measured as in kind scaling. Stages are separate points at the end,
because a process that has profiled may launch more slowly.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jobs.hardware.stats import summarize
from jobs.measure.call import FunctionCall, measure_call
from jobs.measure.clock import l2_filler
from jobs.measure.operator import OPERATOR_QUANTITIES, LayoutsSpec, OperatorCase, measure_operator
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import STAGE, TELEMETRY
from jobs.specs.fields import Implementations
from jobs.specs.nsa_effect import refuse_idle
from nsa_core.kernels.runtime.launch import Started, observe

QUANTITIES = (*OPERATOR_QUANTITIES, STAGE, *TELEMETRY)

_STAGED = "triton"  # the backend whose launches name their stage


class Case(OperatorCase):
    """One point; `profiles` calls are profiled for its stages, None: it is timed."""

    profiles: int | None = None


class Spec(LayoutsSpec):
    """Head layouts x lengths x passes x implementations, at a fixed number of tokens."""

    kind: Literal["bench"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    implementations: Implementations
    profiles: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=5, description="calls to profile for the stages of each fullest pass, by Triton on a GPU; 0: none"
    )

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        refuse_idle(self, self.nsa, self.implementations, self.dtype)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Timed points, shortest lengths first, then stage points in the same order.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        sweeps = [
            sweep.points([length], self.passes, self.implementations) for length, sweep in self.sweeps(machine, Case)
        ]
        timed = [point for points in sweeps for point in points]
        if machine.device != "cuda" or self.profiles == 0:
            return timed
        fullest = max(self.passes, key=len)
        staged = []
        for point in timed:
            case = point.case
            assert isinstance(case, Case)
            if (case.implementation, case.pass_) == (_STAGED, fullest):
                profiled = case.model_copy(update={"profiles": self.profiles})
                staged.append(replace(point, label=f"{point.label} stages", case=profiled))
        return timed + staged


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the operator and measure its time and memory; or, with `profiles`, its time by stage.

    Raises:
        ProfileError: the profiler does not see the project's kernels.
        And as measure_call.
    """
    profiles = case.profiles
    if profiles is None:
        return measure_operator(case, beat)

    def staged(call: FunctionCall, measured: Measurement) -> Measurement:
        stages = measure_stages(call.run, case.torch_device, profiles, beat)
        return replace(
            measured, metrics=(*stages.metrics, *measured.metrics), files={**measured.files, "kernels.txt": stages.text}
        )

    return measure_call(case, case.check, case.call, beat, memory=False, then=staged)


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
