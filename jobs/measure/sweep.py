"""Points of a sweep of the operator or a whole model: lengths x passes x implementations, for some head layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Self

from pydantic import Field, model_validator

from jobs.measure.case import bare_model
from jobs.measure.check import DENSE_KERNELS
from jobs.measure.clock import TimingPlan
from jobs.measure.operator import OperatorCase
from jobs.schema.point import Machine, Point
from jobs.specs.fields import MOST, BareNSA, DType, HeadsSpec, Large, Lengths, Passes, TimingSpec, Unique, torch_dtype
from jobs.specs.fit import backend_reasons, dense_reasons, does_not_fit, heads_of, refuse_unusable, threads
from jobs.specs.spec import JobSpec
from nsa_core.model import ModelConfig


class LayoutsSpec(JobSpec):
    """Head layouts x lengths x passes of the operator, at a fixed number of tokens."""

    shapes: Annotated[list[HeadsSpec], Field(min_length=1), Unique]
    lengths: Lengths
    tokens: Large = Field(default=32768, description="of a call, as sequences of each length; one sequence beyond")
    passes: Passes = Field(default=["forward", "forward+backward"])
    dtype: DType = "bfloat16"
    nsa: BareNSA | None = Field(default=None, description="None: the defaults")
    timing: TimingSpec = TimingSpec()

    @model_validator(mode="after")
    def _whole_batches(self) -> Self:
        for length in self.lengths:
            if length < self.tokens and self.tokens % length:
                raise ValueError(f"lengths: {length}: use a divisor of tokens = {self.tokens}, or a length beyond it")
            if self.tokens // length > MOST:
                raise ValueError(f"tokens: {self.tokens}: use at most {MOST * length}, {MOST:,} sequences of {length}")
        return self

    def sweeps(self, machine: Machine) -> list[tuple[int, Sweep]]:
        """Each length with its sweep for each head layout, shortest lengths first."""
        return [
            (length, self._sweep(heads, length, machine)) for length in sorted(self.lengths) for heads in self.shapes
        ]

    def _sweep(self, heads: HeadsSpec, length: int, machine: Machine) -> Sweep:
        model = bare_model(heads.query_heads, heads.kv_heads, heads.head_dim)
        model = model if self.nsa is None else replace(model, nsa=self.nsa)
        batch = max(1, self.tokens // length)
        return Sweep(self, machine, "attention", model, batch, self.dtype, self.timing.plan)


def in_a_case(point: Point) -> Point:
    """The point of a sweep with its head layout in the label, and its configuration in the section `case`."""
    axes = point.axes
    layout = f"{axes.query_heads}/{axes.kv_heads} d{axes.head_dim}"
    return replace(point, label=f"{layout} {point.label}", config={"case": point.config})


@dataclass(frozen=True)
class Sweep:
    """Coordinates that all points of a sweep share.

    Attributes:
        spec: the job, for its kind, seed, resources and memory limit.
        machine: the device to measure on.
        workload: "attention" alone, or the whole "model".
        model: the model, or the model whose attention is measured.
        batch: sequences in a call.
        dtype: name of the dtype.
        timing: limits of the time measurement.
    """

    spec: JobSpec
    machine: Machine
    workload: str
    model: ModelConfig
    batch: int
    dtype: str
    timing: TimingPlan

    def points(self, lengths: Sequence[int], passes: Sequence[str], implementations: Sequence[str]) -> list[Point]:
        """Points for every combination, shortest lengths first: an interrupted sweep is complete up to some length.

        Raises:
            SpecError: an implementation cannot run on the machine.
        """
        dtype, heads = torch_dtype(self.dtype), heads_of(self.model)
        reasons = backend_reasons(self.machine, dtype, heads) | dense_reasons(self.machine, dtype, heads.width)
        refuse_unusable(implementations, reasons)
        return [self._point(*axes) for axes in product(sorted(lengths), passes, implementations)]

    def _point(self, seq_len: int, pass_: str, implementation: str) -> Point:
        spec, machine, model = self.spec, self.machine, self.model
        case = OperatorCase(
            workload=self.workload,
            implementation=implementation,
            backward=pass_ == "forward+backward",
            seq_len=seq_len,
            batch=self.batch,
            dtype=self.dtype,
            device=machine.device,
            seed=spec.seed,
            threads=threads(spec, machine),
            model=replace(model, attention="dense", backend="auto")
            if implementation in DENSE_KERNELS
            else replace(model, attention="nsa", backend=implementation),
            timing=self.timing,
        )
        estimate = case.estimate()
        needed = None if estimate is None else estimate.total
        return Point(
            kind=spec.kind,
            label=f"{implementation} {pass_} S={seq_len}",
            config=case.to_config(),
            axes=case.axes(pass_),
            estimate_bytes=needed,
            skip_reason=does_not_fit(needed, spec, machine, "shorten lengths or use chunked"),
        )
