"""Points of a sweep of the operator or a whole model: lengths x passes x implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from jobs._fields import torch_dtype
from jobs._fit import backend_reasons, dense_reasons, does_not_fit, refuse_unusable, threads
from jobs._operator import OperatorCase
from jobs.measure.check import DENSE_KERNELS
from jobs.measure.clock import TimingPlan
from jobs.point import Machine, Point
from jobs.spec import JobSpec
from nsa_core.model import ModelConfig


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
        operands = torch_dtype(self.dtype), self.model.head_dim
        reasons = backend_reasons(self.machine, *operands) | dense_reasons(self.machine, *operands)
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
