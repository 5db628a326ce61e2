"""Parts of a pass's peak memory: gradients, activations and workspace, as the allocator handed them out.

The profiler records each allocation and release. A block that a gradient lies in when the backward pass has ended is a
gradient; one that was allocated in the forward pass and is still held when that ends is an activation; everything else
is workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

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
    events = list(_flat(inner.kineto_results.experimental_event_tree()))
    ends = {event.name: event.end_time_ns for event in events if event.name in (FORWARD, BACKWARD)}
    return parts_at_peak(_changes(events, device), ends, places)


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _changes(events: Iterable[Any], device: torch.device) -> list[Change]:
    found = []
    for event in events:
        if event.tag.name == "Allocation" and event.typed[1].device.type == device.type:
            allocation = event.typed[1]
            found.append(Change(event.start_time_ns, allocation.ptr, allocation.alloc_size))
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
        if block.lives(at):
            parts[_part(block, address, ends, gradients)] += block.size
    return Parts(**parts)


def _part(block: _Block, address: int, ends: Mapping[str, int], gradients: set[int]) -> str:
    if address in gradients and block.lives(ends[BACKWARD]):
        return "gradients"
    return "activations" if block.lives(ends[FORWARD]) else "workspace"
