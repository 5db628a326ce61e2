"""A profile of a model's pass: which kernels take its time and its memory, and where the host waits for the device.

A point is one implementation, pass and length. It is checked against the oracle, timed without the profiler, and then
profiled once; tables, trace and the allocator's snapshot are kept with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from jobs.measure.call import TimingSpec, measure_call
from jobs.measure.clock import TimingPlan
from jobs.measure.model_pass import ModelPass, PassCase, PassSpec
from jobs.measure.profiler import profile_call
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, TIME, Better, Quantity, Role

BUSY_TIME = Quantity("busy_time", "ms", "Time in which the device computed", "busy", Better.LOWER, Role.HEADLINE)
SYNCHRONIZATIONS = Quantity(
    "synchronizations", "1", "Waits of the host for the device", "waits", Better.LOWER, Role.HEADLINE
)
RANGE_TIME = Quantity("range_*", "ms", "Time of branch or stage")
QUANTITIES = (TIME, BUSY_TIME, SYNCHRONIZATIONS, RANGE_TIME, *MEMORY, *AGREEMENT, *TELEMETRY)


class Case(PassCase):
    """One pass; `timing` is that of the pass without the profiler."""

    timing: TimingPlan


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, each profiled."""

    kind: Literal["profile"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    timing: TimingSpec = Field(default=TimingSpec(), description="of the pass without the profiler")

    def points(self, machine: Machine) -> Sequence[Point]:
        """As PassSpec.pass_points."""
        return self.pass_points(machine, Case, timing=self.timing.plan)


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the model, time its pass, and profile it once.

    Raises:
        As measure_call.
    """

    def profiled(call: ModelPass, measured: Measurement) -> Measurement:
        beat("profile")
        profile = profile_call(call.run, call.device)
        ranges = profile.ranges_ms.items()
        metrics = [
            *measured.metrics,
            Metric.of(BUSY_TIME, profile.busy_ms, method="self times of all kernels of one call, by torch.profiler"),
            *(Metric.of(RANGE_TIME.named(name), ms, method="by torch.profiler") for name, ms in ranges),
        ]
        if (waits := profile.synchronizations) is not None:
            method = "warnings of torch.cuda.set_sync_debug_mode, one call"
            metrics.append(Metric.of(SYNCHRONIZATIONS, sum(waits.values()), method=method))
        return replace(measured, metrics=tuple(metrics), files={**measured.files, **profile.files})

    return measure_call(
        case, case.check, lambda: ModelPass(case), beat, timing=case.timing, throughput=None, then=profiled
    )
