"""The operator, or a model around it, as a case to measure: forward, or forward and backward, at one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator

from jobs.measure.call import FunctionCall, ModelCase, bare_model, measure_call
from jobs.measure.check import Agreement, Operator, check_model, make_inputs
from jobs.measure.clock import TimingSpec
from jobs.measure.model_pass import ModelPass
from jobs.measure.rows import RowCheck
from jobs.schema.peaks import BANDWIDTHS, BF16_PEAKS
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, PEAK_EXTRA_MEMORY, THROUGHPUT, TIME
from jobs.specs import fields
from jobs.specs.fields import ModelledSpec
from jobs.specs.fit import refuse_unusable
from jobs.specs.spec import JobSpec
from nsa_core.functional import BRANCHES
from nsa_core.memory import MemoryEstimate
from nsa_core.model import ModelConfig

# Quantities of `measure_operator`.
OPERATOR_QUANTITIES = (TIME, THROUGHPUT, *MEMORY, ESTIMATE_ERROR, *AGREEMENT)


class OperatorCase(ModelCase):
    """The operator or a whole model."""

    def check(self) -> Agreement:
        """Compare the operator and, for workload model, the loss with the oracle. Raises WrongResult."""
        attention = super().check()
        if self.workload == "attention":
            return attention
        settings = self.torch_dtype, self.torch_device
        model = check_model(self.implementation, self.model, *settings, backward=self.backward, seed=self.seed)
        worse = max(attention, model, key=lambda agreement: agreement.error / agreement.bound)
        return replace(worse, rows=attention.rows)

    def operator(self) -> Operator:
        """The attention that is called."""
        return Operator.of(self.implementation, self.model.nsa, self.branches)

    def call(self) -> FunctionCall | ModelPass:
        """The operator and, if the case is backward, its gradients towards a random tensor; or a model's pass."""
        if self.workload == "model":
            return ModelPass(self)
        operator, device, dtype = self.operator(), self.torch_device, self.torch_dtype
        inputs = make_inputs(self.shape, self.batch, self.seq_len, dtype, device, self.seed, self.backward)
        if operator.computes is None:
            del inputs["gates"]
        leaves = list(inputs.values())
        if not self.backward:
            rows = RowCheck(operator, inputs, None, self.seed)
            return FunctionCall(torch.no_grad()(lambda: operator.attend(inputs)), leaves, rows)
        generator = torch.Generator(device).manual_seed(self.seed + 1)
        towards = torch.randn(inputs["q"].shape, generator=generator, dtype=dtype, device=device)
        unused = self.branches != BRANCHES  # a branch alone reads not all of them

        def run() -> object:
            out = operator.attend(inputs)
            return out, torch.autograd.grad(out, leaves, towards, allow_unused=unused)

        return FunctionCall(run, [*leaves, towards], RowCheck(operator, inputs, towards, self.seed))


def lowest_ms(case: OperatorCase, flops: float, bandwidth: float) -> float:
    """Milliseconds of a call at so many FLOP/s and bytes/s: two products with each key that a query must see, thrice
    with gradients; and reading q, k and v once. Keys of the window are taken to be among the selected ones.
    """
    heads, nsa, length = case.shape, case.operator().computes, case.seq_len
    keys = (length + 1) / 2
    if nsa is not None:
        most = min(max(nsa.window, nsa.slc_count * nsa.slc_block), length)
        keys = most - most * (most - 1) / (2 * length) + max(0, (length / 2 - nsa.cmp_block) / nsa.cmp_stride)
    products = 4 * (3 if case.backward else 1) * case.tokens * heads.query_heads * heads.head_dim * keys
    read = case.tokens * heads.head_dim * (heads.query_heads + 2 * heads.kv_heads) * case.torch_dtype.itemsize
    return 1000 * max(products / flops, read / bandwidth)


def measure_operator(case: OperatorCase, beat: Beat) -> Measurement:
    """Check a case, measure its time and memory, and compare the memory with the prediction. Raises as measure_call."""
    fastest_ms = 0.0
    if case.workload == "attention" and case.device == "cuda":
        card = torch.cuda.get_device_name(case.torch_device)
        fastest_ms = lowest_ms(case, BF16_PEAKS[card], BANDWIDTHS[card]) if card in BF16_PEAKS else 0.0
    _, measured = measure_call(case, case.call, beat, fastest_ms=fastest_ms)
    if (estimate := case.estimate()) is None:
        return measured
    return replace(measured, metrics=(*measured.metrics, estimate_error(estimate, measured)))


def estimate_error(estimate: MemoryEstimate, measured: Measurement) -> Metric:
    """How far a predicted peak is from the measured one [%]."""
    extra = next(metric.value for metric in measured.metrics if metric.name == PEAK_EXTRA_MEMORY.name) * 2**20
    error, method = 100 * (estimate.extra - extra) / extra, "(predicted - measured) / measured, of peak_extra_memory"
    return Metric.of(ESTIMATE_ERROR, error, method=method)


class SweepSpec(JobSpec):
    """Lengths of the operator, or of a model around it, in one dtype."""

    lengths: fields.Lengths
    dtype: fields.DType = "float32"
    timing: TimingSpec = TimingSpec()


class WorkloadSpec(ModelledSpec, SweepSpec):
    """Attention alone, of a preset's heads or of given ones, or a whole model."""

    workload: Literal["attention", "model"] = Field(
        default="attention", description="attention alone, or a whole model"
    )
    batch: fields.Batch = 1
    shape: fields.HeadsSpec | None = None
    nsa: fields.NSA | None = Field(default=None, description="None: the model's, or the defaults")

    @model_validator(mode="after")
    def _check_workload(self) -> Self:
        nsa = self.own_nsa
        if nsa is not None and nsa.compress != "mean" and self.workload == "attention":
            raise ValueError(f"nsa.compress: {nsa.compress!r}: is learned by a layer; use mean, or workload: model")
        return self

    def model_of(self, layers: int | None) -> ModelConfig:
        """The model, or the one whose attention is measured; bare with the shape's heads."""
        if self.shape is None:
            return replace(self.base, layers=layers or self.base.layers)
        return bare_model(self.shape, self.nsa, layers or 1)


@dataclass(frozen=True)
class Sweep:
    """Coordinates that all points of a sweep share."""

    spec: SweepSpec
    machine: Machine
    case: type[OperatorCase]  # the kind's
    model: ModelConfig  # or the one whose attention is measured
    batch: int
    workload: Literal["attention", "model"] = "attention"
    layout: str = ""  # beginning of the labels

    def points(self, lengths: Sequence[int], passes: Sequence[str], implementations: Sequence[str]) -> list[Point]:
        """Points for every combination, shortest lengths first: an interrupted sweep is complete up to some length."""
        refuse_unusable(implementations, self.machine, self.spec.dtype, self.model, fields.DENSE_KERNELS)
        points = []
        for coordinates in product(sorted(lengths), passes, implementations):
            points.append(self.point(self.case_of(*coordinates)))
        return points

    def point(self, case: OperatorCase) -> Point:
        label = f"{self.layout}{case.implementation} {case.pass_} S={case.seq_len}"
        return case.point(self.spec, self.machine, label, "shorten lengths or use chunked")

    def case_of(self, seq_len: int, pass_: str, implementation: str, **own: Any) -> OperatorCase:
        """The case at these coordinates; `own` are fields of the kind's."""
        model = self.model.under(implementation)
        if self.workload == "attention":
            dense = implementation in fields.DENSE_KERNELS  # has no sizes of NSA, so they may not change the key
            model = bare_model(fields.HeadsSpec.of(model), None if dense else model.nsa)
        own |= {"workload": self.workload, "dtype": self.spec.dtype, "timing": self.spec.timing, "model": model}
        return self.case.of(self.spec, self.machine, (implementation, pass_, seq_len, self.batch), **own)


class LayoutsSpec(SweepSpec):
    """Head layouts x lengths x passes of the operator, at a fixed number of tokens."""

    shapes: Annotated[list[fields.HeadsSpec], Field(min_length=1), fields.Unique]
    tokens: fields.Large = Field(
        default=32768, description="of a call, as sequences of each length; one sequence beyond"
    )
    passes: fields.Passes = Field(default=["forward", "forward+backward"])
    dtype: fields.DType = "bfloat16"
    nsa: fields.BareNSA | None = Field(default=None, description="None: the defaults")

    @model_validator(mode="after")
    def _check_whole_batches(self) -> Self:
        for length in self.lengths:
            if length < self.tokens and self.tokens % length:
                raise ValueError(f"lengths: {length}: use a divisor of tokens = {self.tokens}, or a length beyond it")
            if self.tokens // length > (most := fields.MOST):
                raise ValueError(f"tokens: {self.tokens}: use at most {most * length}, {most:,} sequences of {length}")
        return self

    def sweeps(self, machine: Machine, case: type[OperatorCase]) -> list[tuple[int, Sweep]]:
        """Each length with its sweep for each head layout, shortest lengths first."""
        sweeps = []
        for length, heads in product(sorted(self.lengths), self.shapes):
            model = bare_model(heads, self.nsa)
            batch, layout = max(1, self.tokens // length), f"{heads.query_heads}/{heads.kv_heads} d{heads.head_dim} "
            sweeps.append((length, Sweep(self, machine, case, model, batch, layout=layout)))
        return sweeps
