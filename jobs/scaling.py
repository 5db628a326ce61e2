"""Time, throughput and memory against sequence length, for the operator or a whole model, NSA beside dense attention.

A point is one implementation, pass and length. It is checked against the oracle, timed, and its memory watched, in this
order; a prediction of its memory stands beside the measurement, and points predicted not to fit are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs._case import PointCase
from jobs._fields import (
    NSA,
    Count,
    DType,
    Layers,
    Length,
    Preset,
    Unique,
    backend_reasons,
    dense_reasons,
    does_not_fit,
    implementation_names,
    refuse_unusable,
    threads,
    torch_dtype,
)
from jobs.measure import check
from jobs.measure.check import DENSE_KERNELS
from jobs.measure.clock import Plan, measure_time
from jobs.measure.environment import environment
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.point import Axes, Beat, Machine, Measurement, Metric, Point
from jobs.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, TELEMETRY, THROUGHPUT, TIME
from jobs.spec import JobSpec, Strict
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model, predicts
from nsa_core.model import PRESETS, ModelConfig, NSATransformer

QUANTITIES = (TIME, THROUGHPUT, *MEMORY, ESTIMATE_ERROR, *AGREEMENT, *TELEMETRY)

Pass = Literal["forward", "forward+backward"]


Implementations = Annotated[list[str], Field(min_length=1), Unique, implementation_names(*DENSE_KERNELS)]
Passes = Annotated[list[Pass], Field(min_length=1), Unique]
Lengths = Annotated[list[Length], Field(min_length=1), Unique]


class Heads(Strict):
    """Heads of the attention."""

    query_heads: Count
    kv_heads: Count
    head_dim: Count

    @model_validator(mode="after")
    def _possible(self) -> Heads:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads}: use a divisor of query_heads = {self.query_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim}: use an even number: RoPE turns pairs")
        return self


class ShapeSpec(Heads):
    """Heads of the attention, and for workload `model` the rest of the model."""

    layers: Layers | None = None
    dim: Count | None = Field(default=None, description="width of the residual stream; None: query_heads x head_dim")
    ffn_dim: Count | None = None
    vocab_size: Count | None = None


class TimingSpec(Strict):
    """How long to measure; the samples taken are all kept."""

    repeats: Count = Field(default=10, description="samples to take at least")
    min_s: float = Field(default=0.5, ge=0, description="seconds of samples to take at least")
    max_s: float = Field(
        default=20, gt=0, le=10**6, description="seconds after which sampling, or warming up, ends anyway"
    )
    warmup: Count = Field(default=10, description="runs after which warming up ends, steady or not")

    @model_validator(mode="after")
    def _ordered(self) -> TimingSpec:
        if self.min_s > self.max_s:
            raise ValueError(f"min_s: {self.min_s:g}: sampling ends after max_s; use at most max_s = {self.max_s:g}")
        return self

    @property
    def plan(self) -> Plan:
        return Plan(self.repeats, self.min_s, self.max_s, self.warmup)


class Spec(JobSpec):
    """A sweep of lengths x implementations x passes."""

    kind: Literal["scaling"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    workload: Literal["attention", "model"] = "attention"
    implementations: Implementations
    passes: Passes = Field(default=["forward", "forward+backward"])
    lengths: Lengths
    batch: Count = 1
    dtype: DType = "float32"
    preset: Preset | None = None
    shape: ShapeSpec | None = None
    nsa: NSA | None = Field(default=None, description="None: the preset's, or the defaults")
    timing: TimingSpec = TimingSpec()

    @model_validator(mode="after")
    def _one_shape(self) -> Spec:
        if self.preset is not None and self.shape is not None:
            raise ValueError(f"preset: {self.preset!r}: shape is given as well; keep one of the two")
        if self.preset is None and self.shape is None:
            raise ValueError(f"shape: missing; give shape or preset (one of {', '.join(PRESETS)})")
        if self.shape is not None:
            _check_shape(self.shape, self.workload)
        if self.workload == "model" and (
            forced := [name for name in self.implementations if DENSE_KERNELS.get(name, "auto") != "auto"]
        ):
            raise ValueError(f"implementations: {forced[0]!r}: is for workload attention alone; use dense")
        if self.nsa is not None and self.nsa.compress != "mean" and self.workload == "attention":
            raise ValueError(
                f"nsa.compress: {self.nsa.compress!r}: is learned by a layer; use mean, or workload: model"
            )
        return self

    @property
    def model(self) -> ModelConfig:
        """The model, or the one whose attention is measured (a single layer where only heads are given)."""
        if self.preset is not None:
            base = PRESETS[self.preset]
        else:
            assert self.shape is not None
            base = _model_of(self.shape)
        return base if self.nsa is None else replace(base, nsa=self.nsa)

    def points(self, machine: Machine) -> Sequence[Point]:
        """Shortest lengths first, so that a sweep that is cut short is complete up to some length.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        operands = torch_dtype(self.dtype), self.model.head_dim
        reasons = backend_reasons(machine, *operands) | dense_reasons(machine, *operands)
        refuse_unusable(self.implementations, reasons)
        axes = product(self.lengths, self.passes, self.implementations)
        return [self._point(machine, *coordinates) for coordinates in sorted(axes, key=lambda axis: axis[0])]

    def _point(self, machine: Machine, seq_len: int, pass_: str, implementation: str) -> Point:
        model = self.model
        case = Case(
            workload=self.workload,
            implementation=implementation,
            backward=pass_ == "forward+backward",
            seq_len=seq_len,
            batch=self.batch,
            dtype=self.dtype,
            device=machine.device,
            seed=self.seed,
            threads=threads(self, machine),
            model=replace(model, attention="dense", backend="auto")
            if implementation in DENSE_KERNELS
            else replace(model, attention="nsa", backend=implementation),
            timing=self.timing.plan,
        )
        estimate = case.estimate()
        needed = None if estimate is None else estimate.total
        axes = Axes(
            implementation=implementation,
            workload=self.workload,
            pass_=pass_,
            seq_len=seq_len,
            batch=self.batch,
            query_heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            layers=model.layers if self.workload == "model" else None,
            dtype=self.dtype,
            device=machine.device,
        )
        return Point(
            kind="scaling",
            label=f"{implementation} {pass_} S={seq_len}",
            config=case.to_config(),
            axes=axes,
            estimate_bytes=needed,
            skip_reason=does_not_fit(needed, self, machine, "shorten lengths or use chunked"),
        )


def _check_shape(shape: ShapeSpec, workload: str) -> None:
    rest = {"layers": shape.layers, "ffn_dim": shape.ffn_dim, "vocab_size": shape.vocab_size}
    for name, value in (rest | {"dim": shape.dim}).items():
        if workload == "attention" and value is not None:
            raise ValueError(f"shape.{name}: {value}: has no meaning for workload attention; remove it")
        if workload == "model" and value is None and name in rest:
            raise ValueError(f"shape.{name}: missing; workload model needs it")


def _model_of(shape: ShapeSpec) -> ModelConfig:
    dim = shape.dim or shape.query_heads * shape.head_dim
    return ModelConfig(
        vocab_size=shape.vocab_size or 1,
        dim=dim,
        layers=shape.layers or 1,
        heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn_dim=shape.ffn_dim or 1,
    )


@dataclass(frozen=True)
class Case(PointCase):
    """One point's configuration, as measured.

    Attributes:
        backward: whether the gradients are computed, too.
    """

    backward: bool

    def _used(self) -> tuple[str, ...]:
        return ("heads", "kv_heads", "head_dim") + (() if self.implementation in DENSE_KERNELS else ("nsa",))

    @property
    def shape(self) -> check.Shape:
        return check.Shape(self.model.heads, self.model.kv_heads, self.model.head_dim)

    def estimate(self) -> MemoryEstimate | None:
        """What nsa_core.memory predicts for it; None where it cannot tell."""
        if not predicts(self.implementation):
            return None
        if self.workload == "model":
            return estimate_model(
                self.model,
                implementation=self.implementation,
                batch=self.batch,
                seq_len=self.seq_len,
                dtype=self.torch_dtype,
                backward=self.backward,
                optimizer=None,
                device=torch.device(self.device),
            )
        return estimate_attention(
            self.model.nsa,
            implementation=self.implementation,
            batch=self.batch,
            seq_len=self.seq_len,
            query_heads=self.model.heads,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            dtype=self.torch_dtype,
            backward=self.backward,
            device=torch.device(self.device),
        )


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Check, time and weigh one point.

    Raises:
        WrongResult: the implementation disagrees with the oracle.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    case = Case.from_config(config)
    device = case.start()
    beat("check")
    agreement = agree(case)
    beat("inputs")
    call, tensors = (_model_call if case.workload == "model" else attention_call)(case, device)
    beat("first run")
    route = route_of(call)
    timing = measure_time(call, device, case.timing, beat)
    beat("memory")
    peak = measure_peak(call, device, tensor_bytes(tensors))
    time = summarize(TIME, timing.samples_ms, timing.method)
    tokens = case.batch * case.seq_len
    per_second = [1000 * tokens / ms for ms in timing.samples_ms]
    metrics = [
        time,
        summarize(THROUGHPUT, per_second, f"{tokens} tokens over each sample of time"),
        *peak.metrics(),
        *agreement.metrics(),
    ]
    if (estimate := case.estimate()) is not None:
        error = 100 * (estimate.extra - peak.extra) / peak.extra
        method = "(predicted - measured) / measured, of peak_extra_memory"
        metrics.append(Metric.of(ESTIMATE_ERROR, error, method=method))
    return Measurement(tuple(metrics), route, environment(device), peak.files)


def agree(case: Case) -> check.Agreement:
    """Compare a case's operator, and for workload model its loss, with the oracle. Raises WrongResult."""
    device = torch.device(case.device)
    attention = check.check_attention(
        case.implementation,
        case.model.nsa,
        case.shape,
        case.torch_dtype,
        device,
        backward=case.backward,
        seed=case.seed,
    )
    if case.workload == "attention":
        return attention
    model = check.check_model(
        case.implementation, case.model, case.torch_dtype, device, backward=case.backward, seed=case.seed
    )
    return max(attention, model, key=lambda agreement: agreement.error / agreement.bound)


def attention_call(case: Case, device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """The operator from gate logits on; its inputs, which stay."""
    inputs = check.make_inputs(case.shape, case.batch, case.seq_len, case.torch_dtype, device, case.seed, case.backward)
    if case.implementation in DENSE_KERNELS:
        del inputs["gates"]
    if not case.backward:
        return torch.no_grad()(lambda: check.attend(inputs, case.model.nsa, case.implementation)), [*inputs.values()]
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    towards = torch.randn(inputs["q"].shape, generator=generator, dtype=case.torch_dtype, device=device)

    def call() -> object:
        out = check.attend(inputs, case.model.nsa, case.implementation)
        return out, torch.autograd.grad(out, list(inputs.values()), towards)

    return call, [*inputs.values(), towards]


def _model_call(case: Case, device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """The loss of predicting random tokens, and its gradients; the parameters and tokens, which stay."""
    torch.manual_seed(case.seed)
    model = NSATransformer(case.model).to(device, case.torch_dtype).train(case.backward)
    tokens = torch.randint(case.model.vocab_size, (case.batch, case.seq_len + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    del tokens
    parameters = list(model.parameters())
    resident = [*parameters, *model.buffers(), inputs, targets]
    if not case.backward:
        return torch.no_grad()(lambda: model(inputs, targets)), resident

    def call() -> object:
        loss = model(inputs, targets)
        return loss, torch.autograd.grad(loss, parameters)

    return call, resident
