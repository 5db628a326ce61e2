"""The predicted memory of a model against the allocator's, part by part, over sequence lengths.

A point is one implementation, pass and length. It is checked against the oracle; then the pass runs once for the peak
and once under the profiler for the parts of it. A prediction that is far off is a result, not an
error: the gates judge it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from jobs.measure.call import measure_call
from jobs.measure.memory import tensor_bytes
from jobs.measure.model_pass import ModelPass, PassCase, PassSpec
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


FORWARD, BACKWARD = "nsa_bench.forward", "nsa_bench.backward"


@dataclass(frozen=True)
class Parts:
    """Bytes at the peak, beyond those allocated before the pass."""

    gradients: int
    activations: int
    workspace: int


@dataclass(frozen=True)
class Change:
    """An allocation, or with a negative size a release; `time` in nanoseconds."""

    time: int
    address: int
    size: int


@dataclass
class _Block:
    size: int
    born: int
    died: int | None = None

    def lives(self, time: int) -> bool:
        return self.born <= time and (self.died is None or self.died > time)


def measure_parts(
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], object] | None,
    gradients: Callable[[], Iterable[Tensor]],
    device: torch.device,
) -> Parts:
    """Run a pass once under the profiler; returns the parts of its peak.

    Args:
        forward: computes the loss.
        backward: takes the loss; None for a pass without gradients.
        gradients: gives the gradients that are left after `backward`.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watch:
        with record_function(FORWARD):
            loss = forward()
        with record_function(BACKWARD):
            if backward is not None:
                backward(loss)
        places = {gradient.untyped_storage().data_ptr() for gradient in gradients()}
    inner: Any = watch.profiler  # the events' accessors are not in PyTorch's type stubs
    events = list(inner.kineto_results.experimental_event_tree())
    for event in events:  # which grows by the children of each
        events += event.children
    ends = {event.name: event.end_time_ns for event in events if event.name in (FORWARD, BACKWARD)}
    return parts_at_peak(_changes(events, device), ends, places)


def _changes(events: Iterable[Any], device: torch.device) -> list[Change]:
    allocations = [event for event in events if event.tag.name == "Allocation"]
    found = [
        Change(event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size)
        for event in allocations
        if event.typed[1].device.type == device.type
    ]
    return sorted(found, key=lambda change: change.time)


def parts_at_peak(changes: Sequence[Change], ends: Mapping[str, int], gradients: set[int]) -> Parts:
    """Parts of the memory at the peak of `changes`, which are in the order of time.

    Args:
        ends: times at which FORWARD and BACKWARD ended.
        gradients: addresses at which gradients lie when BACKWARD has ended.
    """
    living: dict[int, _Block] = {}
    blocks: list[tuple[int, _Block]] = []
    level = highest = at = 0
    for change in changes:
        if change.size > 0:
            living[change.address] = _Block(change.size, change.time)
            blocks.append((change.address, living[change.address]))
        elif (block := living.pop(change.address, None)) is not None:
            block.died = change.time
        level += change.size
        if level > highest:
            highest, at = level, change.time
    parts = {"gradients": 0, "activations": 0, "workspace": 0}
    for address, block in blocks:
        if not block.lives(at):
            continue
        if address in gradients and block.lives(ends[BACKWARD]):
            part = "gradients"
        else:
            part = "activations" if block.lives(ends[FORWARD]) else "workspace"
        parts[part] += block.size
    return Parts(**parts)
