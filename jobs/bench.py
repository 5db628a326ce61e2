"""The operator against dense attention and the recorded peers: time, memory and stages over head layouts and lengths.

The timed call is the whole operator, from q, k, v and gate logits to the gated sum, at a fixed number of tokens, as for
the peers in orchestrator/reference_data. Times are measured as in kind scaling. Stages are separate points at the end,
because a process that has profiled may launch more slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jobs.hardware.environment import environment
from jobs.measure.operator import OPERATOR_QUANTITIES, OperatorCase, agree, attention_call, measure_operator
from jobs.measure.route import route_of
from jobs.measure.stages import measure_stages
from jobs.measure.sweep import LayoutsSpec, in_a_case
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import STAGE, TELEMETRY
from jobs.specs.fields import Implementations
from jobs.specs.nsa_effect import refuse_idle

QUANTITIES = (*OPERATOR_QUANTITIES, STAGE, *TELEMETRY)

_STAGED = "triton"  # the backend whose launches name their stage


class Spec(LayoutsSpec):
    """Head layouts x lengths x passes x implementations, at a fixed number of tokens."""

    kind: Literal["bench"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    implementations: Implementations
    profiles: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=5, description="calls to profile for the stages of each fullest pass, by Triton on a GPU; 0: none"
    )

    @model_validator(mode="after")
    def _each_field_acts(self) -> Self:
        refuse_idle(self, self.nsa, self.implementations, self.dtype)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Timed points, shortest lengths first, then stage points in the same order.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        sweeps = [sweep.points([length], self.passes, self.implementations) for length, sweep in self.sweeps(machine)]
        timed = [in_a_case(point) for sweep in sweeps for point in sweep]
        if machine.device != "cuda" or self.profiles == 0:
            return timed
        fullest = max(self.passes, key=len)
        return timed + [
            _staged(point, self.profiles)
            for point in timed
            if (point.axes.implementation, point.axes.pass_) == (_STAGED, fullest)
        ]


def _staged(point: Point, profiles: int) -> Point:
    return replace(point, label=f"{point.label} stages", config={**point.config, "profiles": profiles})


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Check the operator and measure its time and memory; or, with `profiles`, check it and measure its time by stage.

    Raises:
        WrongResult: the implementation disagrees with the oracle.
        ProfileError: the profiler does not see the project's kernels.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    case = OperatorCase.from_config(config["case"])
    if "profiles" not in config:
        return measure_operator(case, beat)
    device = case.start()
    beat("check")
    agreement = agree(case)
    beat("inputs")
    call, _ = attention_call(case, device)
    beat("first run")
    route = route_of(call)
    stages = measure_stages(call, device, config["profiles"], beat)
    metrics = (*stages.metrics, *agreement.metrics())
    return Measurement(metrics, route, environment(device), {"kernels.txt": stages.text})
