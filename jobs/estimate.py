"""The predicted memory of a model against the allocator's, part by part, over sequence lengths.

A point is one implementation, pass and length. It is checked against the oracle; then the pass runs once for the peak
and once under the profiler for the parts of it. A prediction that is far off is a result, not an
error: the gates judge it.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from jobs.measure.call import measure_call
from jobs.measure.memory import tensor_bytes
from jobs.measure.passes import ModelPass, PassCase, PassSpec, estimate_error
from jobs.schema.point import Beat, Measurement, Metric
from jobs.schema.quantities import AGREEMENT, ESTIMATE_ERROR, MEMORY, TELEMETRY, Quantity, Role
from nsa_core.memory import predicts

PREDICTED = Quantity("predicted_*", "MiB", "Predicted")
ALLOCATED = Quantity("allocated_*", "MiB", "Allocated")
QUANTITIES = (replace(ESTIMATE_ERROR, role=Role.HEADLINE), *MEMORY, PREDICTED, ALLOCATED, *AGREEMENT, *TELEMETRY)

FORWARD, BACKWARD = "nsa_bench.forward", "nsa_bench.backward"  # ranges of a profile

Case = PassCase


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, each predicted and measured."""

    kind: Literal["estimate"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe

    @model_validator(mode="after")
    def _check_predicted(self) -> Self:
        for name in self.implementations:
            if name != "triton" and not predicts(name):  # Triton may be on the GPU host alone
                raise ValueError(f"implementations: {name!r}: its memory is not predicted; leave it out")
        return self


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the model, and compare the parts of its memory with the prediction. Raises as measure_call."""
    call, measured = measure_call(case, lambda: ModelPass(case), beat)
    beat("parts")
    call.clear()
    parts = measure_parts(call.forward, call.backward, call.parameters, call.device)
    resident = {"parameters": call.parameters, "optimizer": call.state, "inputs": [*call.inputs]}
    allocated = {name: tensor_bytes(tensors) for name, tensors in resident.items()} | parts
    estimate = case.estimate()
    assert estimate is not None
    metrics = [estimate_error(estimate, measured)]
    by_hand, by_events = "nsa_core.memory", "sizes of tensors; beyond them the allocator's events, by the profiler"
    for family, sizes, method in ((PREDICTED, asdict(estimate), by_hand), (ALLOCATED, allocated, by_events)):
        metrics += [Metric.of(family.named(name), size / 2**20, method=method) for name, size in sizes.items()]
    return replace(measured, metrics=(*metrics, *measured.metrics))


def measure_parts(
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], object],
    parameters: Iterable[Tensor],
    device: torch.device,
) -> dict[str, int]:
    """Bytes of a pass at its peak, beyond those allocated before it: gradients, activations and workspace.

    The pass runs once under the profiler. Gradients are those that `backward`, which takes the loss, leaves in the
    parameters; activations what lives when `forward` has ended.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watch:
        with record_function(FORWARD):
            loss = forward()
        with record_function(BACKWARD):
            backward(loss)
        gradients = {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}
    inner: Any = watch.profiler  # the events' accessors are not in PyTorch's type stubs
    events = list(inner.kineto_results.experimental_event_tree())
    for event in events:  # which grows by the children of each
        events += event.children
    ends = {event.name: event.end_time_ns for event in events if event.name in (FORWARD, BACKWARD)}
    changes = [event for event in events if event.tag.name == "Allocation"]
    births: dict[int, tuple[int, int]] = {}  # time and size of the living, by address
    lives: list[tuple[int, int, int, float]] = []  # address, size, and times of birth and release
    level = highest = peak_at = 0
    for event in sorted(changes, key=lambda event: event.start_time_ns):
        time, change = event.start_time_ns, event.typed[1]
        if change.device.type != device.type:
            continue
        if change.alloc_size > 0:
            births[change.ptr] = time, change.alloc_size
        elif change.ptr in births:
            born, size = births.pop(change.ptr)
            lives.append((change.ptr, size, born, time))
        level += change.alloc_size
        if level > highest:
            highest, peak_at = level, time
    lives += [(address, size, born, float("inf")) for address, (born, size) in births.items()]
    parts = {"gradients": 0, "activations": 0, "workspace": 0}
    for address, size, born, died in lives:
        if born <= peak_at < died:
            if address in gradients and born <= ends[BACKWARD] < died:
                parts["gradients"] += size
            else:
                parts["activations" if born <= ends[FORWARD] < died else "workspace"] += size
    return parts
