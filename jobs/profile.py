"""A profile of a model's pass: which kernels take its time and its memory, and where the host waits for the device.

A point is one implementation, pass and length. It is checked against the oracle, timed without the profiler, and then
profiled once; tables, trace and the allocator's snapshot are kept with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from jobs.hardware.environment import environment
from jobs.measure.clock import TimingPlan, measure_time
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.model_pass import ModelPass, PassSpec, agree
from jobs.measure.profiler import profile_call
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.schema.point import Beat, Measurement, Metric
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, TIME, Better, Quantity, Role
from jobs.specs.fields import TimingSpec

BUSY_TIME = Quantity("busy_time", "ms", "Time in which the device computed", "busy", Better.LOWER, Role.HEADLINE)
SYNCHRONIZATIONS = Quantity(
    "synchronizations", "1", "Waits of the host for the device", "waits", Better.LOWER, Role.HEADLINE
)
RANGE_TIME = Quantity("range_*", "ms", "Time of branch or stage")
QUANTITIES = (TIME, BUSY_TIME, SYNCHRONIZATIONS, RANGE_TIME, *MEMORY, *AGREEMENT, *TELEMETRY)


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, each profiled."""

    kind: Literal["profile"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    timing: TimingSpec = Field(default=TimingSpec(), description="of the pass without the profiler")

    def _own(self) -> dict[str, Any]:
        return {"timing": self.timing.model_dump(mode="json")}


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Check the model, time its pass, and profile it once.

    Raises:
        WrongResult: the attention disagrees with the oracle.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    beat("check")
    agreement = agree(config)
    beat("inputs")
    trial = ModelPass(config)

    def call() -> object:
        trial.clear()
        return trial.run()

    beat("first run")
    route = route_of(call)
    timing = measure_time(call, trial.device, TimingPlan(**config["timing"]), beat)
    beat("memory")
    trial.clear()
    peak = measure_peak(trial.run, trial.device, tensor_bytes(trial.resident))
    beat("profile")
    found = profile_call(call, trial.device)
    metrics = [
        summarize(TIME, timing.samples_ms, timing.method),
        Metric.of(BUSY_TIME, found.busy_ms, method="self times of all kernels of one call, by torch.profiler"),
        *(Metric.of(RANGE_TIME.named(name), ms, method="by torch.profiler") for name, ms in found.ranges_ms.items()),
        *peak.metrics(),
        *agreement.metrics(),
    ]
    if (waits := found.synchronizations) is not None:
        method = "warnings of torch.cuda.set_sync_debug_mode, one call"
        metrics.append(Metric.of(SYNCHRONIZATIONS, sum(waits.values()), method=method))
    return Measurement(tuple(metrics), route, environment(trial.device), {**peak.files, **found.files})
