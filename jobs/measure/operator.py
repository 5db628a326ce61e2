"""Measurement of the operator, or of a model around it: the case, the check against the oracle, the timed call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jobs.hardware.environment import environment
from jobs.measure import check
from jobs.measure.case import PointCase
from jobs.measure.check import DENSE_KERNELS
from jobs.measure.clock import measure_time
from jobs.measure.memory import measure_peak, tensor_bytes
from jobs.measure.route import route_of
from jobs.measure.stats import summarize
from jobs.schema.point import Beat, Measurement, Metric
from jobs.schema.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, PEAK_EXTRA_MEMORY, THROUGHPUT, TIME
from nsa_core.memory import MemoryEstimate, estimate_attention, estimate_model, predicts
from nsa_core.model import NSATransformer

# Quantities of `measure_operator`.
OPERATOR_QUANTITIES = (TIME, THROUGHPUT, *MEMORY, ESTIMATE_ERROR, *AGREEMENT)


@dataclass(frozen=True)
class OperatorCase(PointCase):
    """A point's configuration: the operator or a whole model, one pass, one length.

    Attributes:
        backward: whether gradients are computed too.
    """

    backward: bool

    def _used(self) -> tuple[str, ...]:
        return ("heads", "kv_heads", "head_dim") + (() if self.implementation in DENSE_KERNELS else ("nsa",))

    @property
    def shape(self) -> check.HeadShape:
        return check.HeadShape.of(self.model)

    def estimate(self) -> MemoryEstimate | None:
        """Memory predicted by nsa_core.memory; None if it has no prediction for the implementation."""
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


def measure_operator(case: OperatorCase, beat: Beat) -> Measurement:
    """Check one case and measure its time and memory.

    Raises:
        WrongResult: the implementation disagrees with the oracle.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    device = case.start()
    beat("check")
    agreement = agree(case)
    beat("inputs")
    call, tensors = (_model_call if case.workload == "model" else attention_call)(case, device)
    measured = measure_call(case, agreement, call, tensors, beat)
    if (estimate := case.estimate()) is None:
        return measured
    extra = next(metric.value for metric in measured.metrics if metric.name == PEAK_EXTRA_MEMORY.name) * 2**20
    error = 100 * (estimate.extra - extra) / extra
    compared = Metric.of(ESTIMATE_ERROR, error, method="(predicted - measured) / measured, of peak_extra_memory")
    return replace(measured, metrics=(*measured.metrics, compared))


def measure_call(
    case: PointCase, agreement: check.Agreement, call: Callable[[], object], tensors: list[Tensor], beat: Beat
) -> Measurement:
    """Time and peak memory of a call that agrees with the oracle.

    Args:
        tensors: those that stay allocated between calls.
    """
    device = torch.device(case.device)
    beat("first run")
    route = route_of(call)
    timing = measure_time(call, device, case.timing, beat)
    beat("memory")
    peak = measure_peak(call, device, tensor_bytes(tensors))
    time = summarize(TIME, timing.samples_ms, timing.method)
    tokens = case.batch * case.seq_len
    per_second = [1000 * tokens / ms for ms in timing.samples_ms]
    metrics = (
        time,
        summarize(THROUGHPUT, per_second, f"{tokens} tokens over each sample of time"),
        *peak.metrics(),
        *agreement.metrics(),
    )
    return Measurement(metrics, route, environment(device), peak.files)


def agree(case: OperatorCase) -> check.Agreement:
    """Compare a case's operator and, for workload model, its loss with the oracle. Raises WrongResult."""
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


def attention_call(case: OperatorCase, device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """A call of the operator, gate logits included, and the tensors that stay allocated between calls."""
    inputs = check.make_inputs(case.shape, case.batch, case.seq_len, case.torch_dtype, device, case.seed, case.backward)
    if case.implementation in DENSE_KERNELS:
        del inputs["gates"]
    if not case.backward:
        return torch.no_grad()(lambda: check.attend(inputs, case.model.nsa, case.implementation)), [*inputs.values()]
    return differentiated(lambda: check.attend(inputs, case.model.nsa, case.implementation), inputs, case.seed)


def differentiated(
    attend: Callable[[], Tensor], inputs: Mapping[str, Tensor], seed: int
) -> tuple[Callable[[], object], list[Tensor]]:
    """A call of `attend` and of its gradients towards the inputs, and the tensors that stay allocated between calls."""
    q = inputs["q"]
    generator = torch.Generator(q.device).manual_seed(seed + 1)
    towards = torch.randn(q.shape, generator=generator, dtype=q.dtype, device=q.device)

    def call() -> object:
        out = attend()
        return out, torch.autograd.grad(out, list(inputs.values()), towards)

    return call, [*inputs.values(), towards]


def _model_call(case: OperatorCase, device: torch.device) -> tuple[Callable[[], object], list[Tensor]]:
    """A call for the loss on random tokens (and its gradients), and the tensors that stay allocated between calls."""
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
