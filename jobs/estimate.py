"""The predicted memory of a model against the allocator's, part by part, over sequence lengths.

A point is one implementation, pass and length. It is checked against the oracle; then the pass runs once for the peak
and once under the profiler for the parts of it (jobs.measure.parts). A prediction that is far off is a result, not an
error: the gates judge it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from pydantic import model_validator

from jobs.hardware.environment import environment
from jobs.measure.memory import Peak, measure_peak, tensor_bytes
from jobs.measure.model_pass import ModelPass, PassSpec, agree, predicted
from jobs.measure.parts import Parts, measure_parts
from jobs.measure.route import route_of
from jobs.schema.point import Beat, Measurement, Metric
from jobs.schema.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, TELEMETRY, Quantity, Role
from nsa_core.memory import MemoryEstimate, predicts

PREDICTED = Quantity("predicted_*", "MiB", "Predicted")
ALLOCATED = Quantity("allocated_*", "MiB", "Allocated")
ERROR = replace(ESTIMATE_ERROR, role=Role.HEADLINE)
QUANTITIES = (ERROR, *MEMORY, PREDICTED, ALLOCATED, *AGREEMENT, *TELEMETRY)

_MIB = 2**20


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, each predicted and measured."""

    kind: Literal["estimate"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe

    @model_validator(mode="after")
    def _predicted(self) -> Spec:
        for name in self.implementations:
            if name != "triton" and not predicts(name):  # Triton may be on the GPU host alone
                raise ValueError(f"implementations: {name!r}: its memory is not predicted; leave it out")
        return self


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Check the model, measure the parts of its memory, and compare them with the prediction.

    Raises:
        WrongResult: the attention disagrees with the oracle.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    beat("check")
    agreement = agree(config)
    beat("inputs")
    trial = ModelPass(config)
    beat("first run")
    route = route_of(trial.run)
    trial.clear()
    beat("memory")
    peak = measure_peak(trial.run, trial.device, tensor_bytes(trial.resident))
    trial.clear()
    beat("parts")
    parts = measure_parts(trial.forward, trial.backward, trial.gradients, trial.device)
    metrics = [*_compared(predicted(config), peak, parts, trial), *peak.metrics(), *agreement.metrics()]
    return Measurement(tuple(metrics), route, environment(trial.device), peak.files)


def _compared(estimate: MemoryEstimate, peak: Peak, parts: Parts, trial: ModelPass) -> list[Metric]:
    """Each part as predicted and as allocated, and the error of all that the pass adds."""
    allocated = {
        "parameters": tensor_bytes([*trial.parameters]),
        "optimizer": tensor_bytes(trial.state),
        "inputs": tensor_bytes([*trial.inputs]),
        **asdict(parts),
    }
    error = 100 * (estimate.extra - peak.extra) / peak.extra
    found = [Metric.of(ERROR, error, method="(predicted - measured) / measured, of peak_extra_memory")]
    by_hand, by_events = "nsa_core.memory", "sizes of tensors; beyond them the allocator's events, by the profiler"
    for family, sizes, method in ((PREDICTED, asdict(estimate), by_hand), (ALLOCATED, allocated, by_events)):
        found += [Metric.of(family.named(name), size / _MIB, method=method) for name, size in sizes.items()]
    return found
