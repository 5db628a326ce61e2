"""Time, throughput and memory against sequence length, for the operator or a whole model, NSA beside dense attention.

A point is one implementation, pass and length. It is checked against the oracle, then timed, then its peak memory is
measured and compared with the prediction. Points predicted not to fit are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from jobs.measure.passes import OPERATOR_QUANTITIES, OperatorCase, WorkloadSpec, measure_operator
from jobs.schema.point import Machine, Point
from jobs.schema.quantities import TELEMETRY
from jobs.specs.fields import DENSE_KERNELS, Count, HeadsSpec, Implementations, Layers, Passes
from jobs.specs.fit import refuse_idle

QUANTITIES = (*OPERATOR_QUANTITIES, *TELEMETRY)

Case = OperatorCase
measure = measure_operator


class ShapeSpec(HeadsSpec):
    """Heads of the attention and, for workload `model`, the rest of the model."""

    layers: Layers | None = None
    dim: Count | None = Field(default=None, description="width of the residual stream; None: query_heads x head_dim")
    ffn_dim: Count | None = None
    vocab_size: Count | None = None


class Spec(WorkloadSpec):
    """A sweep of lengths x implementations x passes."""

    kind: Literal["scaling"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    implementations: Implementations
    passes: Passes = Field(default=["forward", "forward+backward"])
    shape: ShapeSpec | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe

    @model_validator(mode="after")
    def _check_shape(self) -> Spec:
        for name in ("layers", "ffn_dim", "vocab_size", "dim") if self.shape is not None else ():
            value = getattr(self.shape, name)
            if self.workload == "attention" and value is not None:
                raise ValueError(f"shape.{name}: {value}: has no meaning for workload attention; remove it")
            if self.workload == "model" and value is None and name != "dim":
                raise ValueError(f"shape.{name}: missing; workload model needs it")
        if self.workload == "model" and (
            forced := [name for name in self.implementations if DENSE_KERNELS.get(name, "auto") != "auto"]
        ):
            raise ValueError(f"implementations: {forced[0]!r}: is for workload attention alone; use dense")
        refuse_idle(self, self.own_nsa, self.implementations, self.dtype)
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first."""
        model = self.model_of(None if self.shape is None else self.shape.layers)
        if self.shape is not None:
            sizes = self.shape.model_dump(include={"dim", "ffn_dim", "vocab_size"}, exclude_none=True)
            model = replace(model, **sizes)
        grid = self.lengths, self.batch, self.passes, self.implementations
        return self.grid(machine, Case, model, *grid, workload=self.workload)
