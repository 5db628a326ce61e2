"""The operator against dense attention and the recorded peers: time, memory and stages over head layouts and lengths.

The timed call is the whole operator, from q, k, v and gate logits to the gated sum, at a fixed number of tokens, as for
the peers in orchestrator/reference_data. Times are measured as in kind scaling. Stages are separate points at the end,
because a process that has profiled may launch more slowly.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jobs.hardware.stats import summarize
from jobs.measure.call import measure_call
from jobs.measure.clock import l2_filler
from jobs.measure.passes import OPERATOR_QUANTITIES, LayoutsSpec, OperatorCase, measure_operator
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import STAGE, TELEMETRY
from jobs.specs.fields import Implementations
from jobs.specs.fit import refuse_idle
from nsa_core.kernels.runtime.launch import Started, observe

QUANTITIES = (*OPERATOR_QUANTITIES, STAGE, *TELEMETRY)


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
        """Timed points, shortest lengths first, then stage points in the same order."""
        timed: list[Point] = []
        for length, batch, model, layout in self.layouts():
            timed += self.grid(machine, Case, model, [length], batch, self.passes, self.implementations, layout=layout)
        staged = []
        for point in timed if machine.device == "cuda" and self.profiles else ():
            case = point.case
            assert isinstance(case, Case)
            if case.implementation == "triton" and case.pass_ == max(self.passes, key=len):  # its launches name stages
                profiled = case.model_copy(update={"profiles": self.profiles, "timing": None})
                staged.append(replace(point, label=f"{point.label} stages", case=profiled))
        return timed + staged


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the operator and measure its time and memory; or, with `profiles`, its time by stage. Raises ProfileError
    where the profiler does not see the project's kernels, and as measure_call."""
    if case.profiles is None:
        return measure_operator(case, beat)
    call, measured = measure_call(case, case.call, beat, memory=False)
    stages, kernels = measure_stages(call.run, case.torch_device, case.profiles, beat)
    return replace(measured, metrics=(*stages, *measured.metrics), files={"kernels.txt": kernels})


class ProfileError(RuntimeError):
    """The profile does not match the launches. No stage is reported then, as times would be incomplete."""


class Kernel(NamedTuple):
    """One run of a kernel on the device; times in nanoseconds."""

    name: str
    start: int
    duration: int


def measure_stages(call: Callable[[], object], device: torch.device, runs: int, beat: Beat) -> tuple[list[Metric], str]:
    """Profile `call`, which runs the project's kernels on a CUDA device and has run before. Raises ProfileError."""
    filler = l2_filler(device)
    profiles = []
    for run in range(runs + 1):
        beat("stages", max(0, run - 1), runs)
        filler.zero_()
        torch.cuda.synchronize(device)
        with observe() as launches, profile(activities=[ProfilerActivity.CUDA]) as watch:
            call()
            torch.cuda.synchronize(device)
        inner: Any = watch.profiler  # the events' accessors are not in PyTorch's type stubs
        events = (e for e in inner.kineto_results.events() if e.device_type() == DeviceType.CUDA)
        kernels = [Kernel(e.name(), e.start_ns(), e.duration_ns()) for e in events if not e.is_user_annotation()]
        if run:  # a process's first profile starts CUPTI, and may miss kernels
            profiles.append(by_stage(kernels, launches))
    return summarize_stages(profiles)


def by_stage(kernels: Sequence[Kernel], launches: Sequence[Started]) -> Counter[tuple[str, str]]:
    """Nanoseconds of the launched kernels by stage and kernel; PyTorch's own (sorts, sums, copies) are stage "other".
    Raises ProfileError without a launch, or where kernels and launches do not match."""
    if not launches:
        raise ProfileError("none of the project's kernels ran; stages are those of backend triton on a GPU")
    waiting: dict[str, deque[str]] = defaultdict(deque)
    for launch in launches:
        waiting[launch.kernel].append(launch.stage)
    spent: Counter[tuple[str, str]] = Counter()
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.name in waiting and not waiting[kernel.name]:
            raise ProfileError(f"the profile has {kernel.name} more often than it was launched")
        stage = waiting[kernel.name].popleft() if kernel.name in waiting else "other"
        spent[stage, kernel.name] += kernel.duration
    if unseen := [name for name, stages in waiting.items() if stages]:
        raise ProfileError(f"the profile lacks launches of {', '.join(unseen)}; does CUPTI work here?")
    return spent


def summarize_stages(profiles: Sequence[Counter[tuple[str, str]]]) -> tuple[list[Metric], str]:
    """Median over the profiles for every stage in ms, longest first, and one line for each kernel as text."""
    method = "device time of the stage's kernels in one call (CUPTI), L2 overwritten before it"
    metrics = []
    for name in dict.fromkeys(stage for profiled in profiles for stage, _ in profiled):
        times = [sum(ns for (stage, _), ns in profiled.items() if stage == name) / 1e6 for profiled in profiles]
        metrics.append(summarize(STAGE.named(name), times, method))
    lines = [f"{ns / 1e6:10.4f} ms  {stage:30} {kernel}" for (stage, kernel), ns in profiles[-1].most_common()]
    text = "\n".join(["Device time of one call, by stage and kernel.", *lines, ""])
    return sorted(metrics, key=lambda metric: -metric.value), text
