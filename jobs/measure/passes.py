"""Passes to measure, each at one length: of the operator alone, or of a whole model on random tokens."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from jobs.measure.call import FunctionCall, ModelCase, bare_model, measure_call
from jobs.measure.check import Agreement, Operator, check_model, make_inputs
from jobs.measure.clock import TimingSpec
from jobs.measure.rows import RowCheck
from jobs.schema.peaks import BANDWIDTHS, BF16_PEAKS, least_work
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, PEAK_EXTRA_MEMORY, THROUGHPUT, TIME
from jobs.specs import fields, fit
from jobs.specs.fields import DENSE_KERNELS, HeadsSpec, ModelledSpec
from jobs.specs.fit import refuse_idle
from jobs.specs.spec import JobSpec
from nsa_core.functional import BRANCHES
from nsa_core.memory import MemoryEstimate
from nsa_core.model import ModelConfig, NSATransformer

Pass = Literal["forward", "forward+backward", "train"]


class PassCase(ModelCase):
    """A pass of a model with float32 weights; a `dtype` of bfloat16 means autocast."""

    AUTOCAST = True

    def check(self) -> Agreement:
        """Compare a small form of the model with the oracle, and attention at the pass's size. Raises WrongResult."""
        settings = self.torch_dtype, self.torch_device
        agreement = check_model(self.implementation, self.model, *settings, backward=self.backward, seed=self.seed)
        return replace(agreement, rows=self.check_rows())


class ImplementationsSpec(ModelledSpec):
    """A model under several implementations."""

    implementations: fields.OrDense
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="bfloat16: autocast; weights stay")

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        refuse_idle(self, self.own_nsa, self.implementations, self.precision)
        return self

    def refuse_unusable(self, machine: Machine) -> None:
        """Raise SpecError if an implementation cannot run on the machine."""
        fit.refuse_unusable(self.implementations, machine, self.precision, self.base, ("dense",))


class PassSpec(ImplementationsSpec):
    """Lengths x passes x implementations of one model."""

    passes: fields.Several[Pass] = Field(
        default=["forward", "forward+backward", "train"], description="train: with AdamW's state and step"
    )
    lengths: fields.Lengths
    batch: fields.Batch = 1
    checkpointing: bool = Field(default=False, description="compute blocks anew in the backward pass, to save memory")

    @model_validator(mode="after")
    def _check_checkpointing(self) -> Self:
        if self.checkpointing and set(self.passes) == {"forward"}:
            raise ValueError(
                "checkpointing: True: changes nothing of a forward pass; leave it out, or add forward+backward or "
                "train to passes"
            )
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        return self.pass_points(machine, PassCase, timing=getattr(self, "timing", None))

    def pass_points(self, machine: Machine, case_type: type[PassCase], **own: Any) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first; `own` are fields that the kind's Case adds."""
        self.refuse_unusable(machine)
        points = []
        for seq_len, pass_, implementation in product(sorted(self.lengths), self.passes, self.implementations):
            model = replace(self.base.under(implementation), checkpointing=self.checkpointing)
            place = implementation, pass_, seq_len, self.batch
            case = case_type.of(self, machine, place, dtype=self.precision, model=model, **own)
            saves = case.backward and not self.checkpointing
            advice = "shorten lengths or turn checkpointing on" if saves else "shorten lengths, or lower batch"
            points.append(case.point(self, machine, f"{implementation} {pass_} S={seq_len}", advice))
        return points


class ModelPass:
    """A model on random tokens, and one pass of it."""

    rows = None  # as of FunctionCall

    def __init__(self, case: ModelCase) -> None:
        torch.manual_seed(case.seed)
        self.case, self.device = case, case.torch_device
        weights = torch.float32 if case.AUTOCAST else case.torch_dtype
        self._precision = torch.autocast(self.device.type, case.torch_dtype, enabled=weights != case.torch_dtype)
        self.model = NSATransformer(case.model).to(self.device, weights).train(case.backward)
        tokens = torch.randint(case.model.vocab_size, (case.batch, case.seq_len + 1), device=self.device)
        self.inputs = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        self.parameters = list(self.model.parameters())
        # Its work and its memory matter here, its numbers do not.
        fused = self.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self.parameters, fused=fused) if case.pass_ == "train" else None

    @property
    def state(self) -> list[Tensor]:
        """Tensors of the optimizer on the device; none before its first step."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        tensors = (x for state in states for x in state.values() if isinstance(x, Tensor))
        return [x for x in tensors if x.device.type == self.device.type]  # "cuda" is not equal to a tensor's "cuda:0"

    @property
    def resident(self) -> list[Tensor]:
        return [*self.parameters, *self.model.buffers(), *self.state, *self.inputs]

    def forward(self) -> Tensor:
        """Loss of the tokens."""
        with torch.set_grad_enabled(self.case.backward), self._precision:
            return self.model(*self.inputs)

    def backward(self, loss: Tensor) -> None:
        """The pass back from a loss, and the optimizer's step, as far as the pass has them."""
        if self.case.backward:
            loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()

    def run(self) -> Tensor:
        """The whole pass, without the gradients of an earlier one; its own stay."""
        self.clear()
        loss = self.forward()
        self.backward(loss)
        return loss

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


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
    """Milliseconds of the least work of a call at so many FLOP/s and bytes/s."""
    shape, nsa = case.shape, case.operator().computes
    heads, sizes = (shape.query_heads, shape.kv_heads, shape.head_dim), nsa and asdict(nsa)
    about = (case.tokens, case.seq_len, heads, case.torch_dtype.itemsize)
    products, read = least_work(*about, backward=case.backward, nsa=sizes)
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

    def case_of(
        self, machine: Machine, case: type[OperatorCase], model: ModelConfig, place: tuple[str, str, int, int],
        **own: Any,
    ) -> OperatorCase:  # fmt: skip
        """The kind's case at a place: implementation, pass, length and batch; `own` are further fields of it."""
        model = model.under(place[0])
        if own.setdefault("workload", "attention") == "attention":
            dense = place[0] in DENSE_KERNELS  # has no sizes of NSA, so they may not change the key
            model = bare_model(HeadsSpec.of(model), None if dense else model.nsa)
        return case.of(self, machine, place, **own | {"dtype": self.dtype, "timing": self.timing, "model": model})

    def grid(
        self, machine: Machine, case: type[OperatorCase], model: ModelConfig, lengths: Sequence[int], batch: int,
        passes: Sequence[str], implementations: Sequence[str], *, layout: str = "", **own: Any,
    ) -> list[Point]:  # fmt: skip
        """Points for every combination, shortest lengths first: an interrupted sweep is complete up to some length."""
        fit.refuse_unusable(implementations, machine, self.dtype, model, DENSE_KERNELS)
        places = product(sorted(lengths), passes, implementations)
        return [
            self.point_of(self.case_of(machine, case, model, (name, pass_, length, batch), **own), machine, layout)
            for length, pass_, name in places
        ]

    def point_of(self, case: OperatorCase, machine: Machine, layout: str = "") -> Point:
        label = f"{layout}{case.implementation} {case.pass_} S={case.seq_len}"
        return case.point(self, machine, label, "shorten lengths or use chunked")


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

    def layouts(self) -> list[tuple[int, int, ModelConfig, str]]:
        """Length, batch, model and beginning of the labels for each length and head layout, shortest lengths first."""
        return [
            (
                length,
                max(1, self.tokens // length),
                bare_model(heads, self.nsa),
                f"{heads.query_heads}/{heads.kv_heads} d{heads.head_dim} ",
            )
            for length, heads in product(sorted(self.lengths), self.shapes)
        ]
