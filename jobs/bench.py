"""The operator against dense attention and the recorded peers: time, memory and stages over head layouts and lengths.

The timed call is the whole operator, from q, k, v and gate logits to the gated sum, at a fixed number of tokens, as for
the peers in orchestrator/reference_data. Times are measured as in kind scaling. Stages are separate points at the end,
because a process that has profiled may launch more slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from jobs._case import bare_model
from jobs._fields import MOST, NSA, DType, HeadsSpec, Implementations, Large, Lengths, Passes, TimingSpec, Unique
from jobs._operator import OPERATOR_QUANTITIES, OperatorCase, agree, attention_call, measure_operator
from jobs._sweep import Sweep
from jobs.measure.environment import environment
from jobs.measure.route import route_of
from jobs.measure.stages import measure_stages
from jobs.point import Beat, Machine, Measurement, Point
from jobs.quantities import STAGE, TELEMETRY
from jobs.spec import JobSpec

QUANTITIES = (*OPERATOR_QUANTITIES, STAGE, *TELEMETRY)

_STAGED = "triton"  # the backend whose launches name their stage


class Spec(JobSpec):
    """Head layouts x lengths x passes x implementations, at a fixed number of tokens."""

    kind: Literal["bench"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    implementations: Implementations
    shapes: Annotated[list[HeadsSpec], Field(min_length=1), Unique]
    lengths: Lengths
    tokens: Large = Field(default=32768, description="of a call, as sequences of each length; one sequence beyond")
    passes: Passes = Field(default=["forward", "forward+backward"])
    dtype: DType = "bfloat16"
    nsa: NSA | None = Field(default=None, description="None: the defaults")
    timing: TimingSpec = TimingSpec()
    profiles: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=5, description="calls to profile for the stages of each fullest pass, by Triton on a GPU; 0: none"
    )

    @field_validator("nsa")
    @classmethod
    def _nothing_learned(cls, nsa: NSA | None) -> NSA | None:
        if nsa is not None and nsa.compress != "mean":
            raise ValueError(f"compress: {nsa.compress!r}: is learned by a layer; use mean")
        return nsa

    @model_validator(mode="after")
    def _whole_batches(self) -> Spec:
        for length in self.lengths:
            if length < self.tokens and self.tokens % length:
                raise ValueError(f"lengths: {length}: use a divisor of tokens = {self.tokens}, or a length beyond it")
            if self.tokens // length > MOST:
                raise ValueError(f"tokens: {self.tokens}: use at most {MOST * length}, {MOST:,} sequences of {length}")
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Timed points, shortest lengths first, then stage points in the same order.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        sweeps = [self._sweep(heads, length, machine) for length in sorted(self.lengths) for heads in self.shapes]
        timed = [_timed(point) for sweep in sweeps for point in sweep]
        if machine.device != "cuda" or self.profiles == 0:
            return timed
        fullest = max(self.passes, key=len)
        return timed + [
            _staged(point, self.profiles)
            for point in timed
            if (point.axes.implementation, point.axes.pass_) == (_STAGED, fullest)
        ]

    def _sweep(self, heads: HeadsSpec, length: int, machine: Machine) -> list[Point]:
        """Points for one head layout and length."""
        model = bare_model(heads.query_heads, heads.kv_heads, heads.head_dim)
        model = model if self.nsa is None else replace(model, nsa=self.nsa)
        batch = max(1, self.tokens // length)
        sweep = Sweep(self, machine, "attention", model, batch, self.dtype, self.timing.plan)
        return sweep.points([length], self.passes, self.implementations)


def _timed(point: Point) -> Point:
    return replace(point, label=f"{_layout(point)} {point.label}", config={"case": point.config})


def _staged(point: Point, profiles: int) -> Point:
    return replace(point, label=f"{point.label} stages", config={**point.config, "profiles": profiles})


def _layout(point: Point) -> str:
    return f"{point.axes.query_heads}/{point.axes.kv_heads} d{point.axes.head_dim}"


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
