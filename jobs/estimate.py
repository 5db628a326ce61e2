"""The predicted memory of a model against the allocator's, part by part, over sequence lengths.

A point is one implementation, pass and length. It is checked against the oracle; then the pass runs once for the peak
and once under the profiler for the parts of it (jobs.measure.parts). A prediction that is far off is a result, not an
error: the gates judge it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Literal

from pydantic import model_validator

from jobs.measure.call import measure_call
from jobs.measure.memory import tensor_bytes
from jobs.measure.model_pass import ModelPass, PassCase, PassSpec
from jobs.measure.parts import measure_parts
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, PEAK_EXTRA_MEMORY, TELEMETRY, Quantity, Role
from nsa_core.memory import predicts

PREDICTED = Quantity("predicted_*", "MiB", "Predicted")
ALLOCATED = Quantity("allocated_*", "MiB", "Allocated")
ERROR = replace(ESTIMATE_ERROR, role=Role.HEADLINE)
QUANTITIES = (ERROR, *MEMORY, PREDICTED, ALLOCATED, *AGREEMENT, *TELEMETRY)

_MIB = 2**20

Case = PassCase


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, each predicted and measured."""

    kind: Literal["estimate"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe

    @model_validator(mode="after")
    def _check_predicted(self) -> Spec:
        for name in self.implementations:
            if name != "triton" and not predicts(name):  # Triton may be on the GPU host alone
                raise ValueError(f"implementations: {name!r}: its memory is not predicted; leave it out")
        return self

    def points(self, machine: Machine) -> Sequence[Point]:
        """As PassSpec.pass_points."""
        return self.pass_points(machine, Case)


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the model, measure the parts of its memory, and compare them with the prediction.

    Raises:
        As measure_call.
    """

    def compared(call: ModelPass, measured: Measurement) -> Measurement:
        """With each part as predicted and as allocated, and the error of all that the pass adds."""
        beat("parts")
        call.clear()
        parts = measure_parts(call.forward, call.backward, call.gradients, call.device)
        allocated = {
            "parameters": tensor_bytes([*call.parameters]),
            "optimizer": tensor_bytes(call.state),
            "inputs": tensor_bytes([*call.inputs]),
            **asdict(parts),
        }
        estimate = case.estimate()
        extra = next(metric.value for metric in measured.metrics if metric.name == PEAK_EXTRA_MEMORY.name) * _MIB
        error = 100 * (estimate.extra - extra) / extra
        metrics = [Metric.of(ERROR, error, method="(predicted - measured) / measured, of peak_extra_memory")]
        by_hand, by_events = "nsa_core.memory", "sizes of tensors; beyond them the allocator's events, by the profiler"
        for family, sizes, method in ((PREDICTED, asdict(estimate), by_hand), (ALLOCATED, allocated, by_events)):
            metrics += [Metric.of(family.named(name), size / _MIB, method=method) for name, size in sizes.items()]
        return replace(measured, metrics=(*metrics, *measured.metrics))

    return measure_call(case, case.check, lambda: ModelPass(case), beat, then=compared)
