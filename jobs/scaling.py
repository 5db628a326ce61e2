"""Time, throughput and memory against sequence length, for the operator or a whole model, NSA beside dense attention.

A point is one implementation, pass and length. It is checked against the oracle, then timed, then its peak memory is
measured and compared with the prediction. Points predicted not to fit are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from jobs.measure.call import bare_model
from jobs.measure.check import DENSE_KERNELS
from jobs.measure.clock import TimingSpec
from jobs.measure.operator import OPERATOR_QUANTITIES, OperatorCase, Sweep, measure_operator
from jobs.schema.point import Machine, Point
from jobs.schema.quantities import TELEMETRY
from jobs.specs.fields import NSA, Count, DType, HeadsSpec, Implementations, Layers, Lengths, Passes, Preset
from jobs.specs.nsa_effect import refuse_idle
from jobs.specs.spec import JobSpec
from nsa_core.model import PRESETS, ModelConfig

QUANTITIES = (*OPERATOR_QUANTITIES, *TELEMETRY)

Case = OperatorCase
measure = measure_operator


class ShapeSpec(HeadsSpec):
    """Heads of the attention and, for workload `model`, the rest of the model."""

    layers: Layers | None = None
    dim: Count | None = Field(default=None, description="width of the residual stream; None: query_heads x head_dim")
    ffn_dim: Count | None = None
    vocab_size: Count | None = None


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
    def _check_shape(self) -> Spec:
        if self.preset is not None and self.shape is not None:
            raise ValueError(f"preset: {self.preset!r}: shape is given as well; keep one of the two")
        if self.preset is None and self.shape is None:
            raise ValueError(f"shape: missing; give shape or preset (one of {', '.join(PRESETS)})")
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
        if self.nsa is not None and self.nsa.compress != "mean" and self.workload == "attention":
            raise ValueError(
                f"nsa.compress: {self.nsa.compress!r}: is learned by a layer; use mean, or workload: model"
            )
        refuse_idle(self, self.nsa, self.implementations, self.dtype)
        return self

    @property
    def model(self) -> ModelConfig:
        """The model, or the model whose attention is measured (a single layer if only heads are given)."""
        if self.preset is not None:
            base = PRESETS[self.preset]
        else:
            shape = self.shape
            assert shape is not None
            base = bare_model(shape.query_heads, shape.kv_heads, shape.head_dim, shape.layers or 1)
            sizes = {name: getattr(shape, name) for name in ("dim", "ffn_dim", "vocab_size")}
            base = replace(base, **{name: size for name, size in sizes.items() if size is not None})
        return base if self.nsa is None else replace(base, nsa=self.nsa)

    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the whole grid, shortest lengths first.

        Raises:
            SpecError: an implementation cannot run on this machine.
        """
        sweep = Sweep(self, machine, Case, self.workload, self.model, self.batch, self.dtype, self.timing)
        return sweep.points(self.lengths, self.passes, self.implementations)
