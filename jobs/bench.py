"""The operator against dense attention and the recorded peers: time, memory and stages over head layouts and lengths.

The timed call is the whole operator, from q, k, v and gate logits to the gated sum, at a fixed number of tokens, as for
the peers in orchestrator/reference_data. Times are measured as in kind scaling. Stages are separate points at the end,
because a process that has profiled may launch more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jobs.measure.call import FunctionCall, measure_call
from jobs.measure.operator import OPERATOR_QUANTITIES, LayoutsSpec, OperatorCase, measure_operator
from jobs.measure.stages import measure_stages
from jobs.schema.point import Beat, Machine, Measurement, Point
from jobs.schema.quantities import STAGE, TELEMETRY
from jobs.specs.fields import Implementations
from jobs.specs.nsa_effect import refuse_idle

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
