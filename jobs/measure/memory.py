"""Peak memory of a call beyond the memory allocated before it: outputs and gradients count, inputs do not.

Measured in a separate run, after the call ran at least once (so that libraries have allocated their workspaces).
CUDA: the caching allocator's counters. CPU: the allocator's own events, so the peak is exact to the byte and does not
depend on memory that the C library keeps.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from jobs.schema.point import Metric
from jobs.schema.quantities import PEAK_DRIVER, PEAK_EXTRA_MEMORY, PEAK_MEMORY, PEAK_RESERVED, PEAK_RSS

_MIB = 2**20
_GRAPHS = " and the memory of CUDA graphs that it leaves out"


@dataclass(frozen=True)
class Peak:
    """Bytes at the call's peak.

    Attributes:
        extra: bytes allocated beyond those allocated before the call.
        allocated: bytes of all tensors together.
        held: bytes held by the process: CUDA's reserved memory; on CPU the high-water mark of the resident set.
        driver: bytes in use on the card as the driver counts them, other processes included; None on CPU.
        method: description of the measurement.
        files: reports of the allocator, as text by file name.
    """

    extra: int
    allocated: int
    held: int
    driver: int | None
    method: str
    files: dict[str, str]

    def metrics(self) -> list[Metric]:
        """Metrics of the peak in MiB."""
        held = PEAK_RSS if self.driver is None else PEAK_RESERVED
        found = [(PEAK_EXTRA_MEMORY, self.extra), (PEAK_MEMORY, self.allocated), (held, self.held)]
        if self.driver is not None:
            found.append((PEAK_DRIVER, self.driver))
        return [Metric.of(quantity, size / _MIB, method=self.method) for quantity, size in found]


@dataclass(frozen=True)
class GraphMemory:
    """Bytes of the memory that CUDA graphs were captured in, which stays theirs.

    Attributes:
        held: all of it.
        idle: the part that the allocator counts as free, though every replay writes to it.
    """

    held: int
    idle: int


def graph_memory(device: torch.device) -> GraphMemory:
    """Memory of the CUDA graphs of this process on `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    here = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    segments = [segment for segment in here if tuple(segment["segment_pool_id"]) != (0, 0)]
    held = sum(segment["total_size"] for segment in segments)
    return GraphMemory(held, held - sum(segment["allocated_size"] for segment in segments))


def measure_held(call: Callable[[], object], device: torch.device, resident: int) -> int:
    """Run `call` once; returns the bytes of all tensors while its result is alive. `resident` as in measure_peak."""
    gc.collect()
    if device.type == "cuda":
        result = call()
        held = torch.cuda.memory_allocated(device)
    else:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
            result = call()
        held = resident + sum(size for _, size in _allocations(watch))
    del result
    return held


def measure_peak(call: Callable[[], object], device: torch.device, resident: int, *, cuda_graphs: bool = False) -> Peak:
    """Run `call` once and measure its peak memory; its result stays alive until the end.

    Args:
        resident: bytes of tensors allocated before the call (CPU only: CUDA counts them itself).
        cuda_graphs: whether the call replays CUDA graphs, so that the memory of this process's graphs is used by it.
    """
    gc.collect()
    return _peak_cuda(call, device, cuda_graphs) if device.type == "cuda" else _peak_cpu(call, resident)


def _peak_cuda(call: Callable[[], object], device: torch.device, cuda_graphs: bool) -> Peak:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    graphs = graph_memory(device).idle if cuda_graphs else 0
    allocated = torch.cuda.max_memory_allocated(device) + graphs
    free, total = torch.cuda.mem_get_info(device)
    summary = torch.cuda.memory_summary(device)
    del result
    return Peak(
        extra=allocated - before,
        allocated=allocated,
        held=torch.cuda.max_memory_reserved(device),
        driver=total - free,
        method=f"CUDA caching allocator, one run: max_memory_allocated{_GRAPHS if cuda_graphs else ''} minus "
        "memory_allocated before it",
        files={"memory_summary.txt": summary},
    )


def _peak_cpu(call: Callable[[], object], resident: int) -> Peak:
    lifetime = not _reset_high_water()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        result = call()
    extra = _highest_sum(_allocations(watch))
    rss = _high_water()
    del result
    since = "since the process began" if lifetime else "during the run (profiler included)"
    return Peak(
        extra=extra,
        allocated=resident + extra,
        held=rss,
        driver=None,
        method=f"events of PyTorch's CPU allocator, one run; resident set: high-water mark {since}",
        files={},
    )


def _allocations(watch: profile) -> list[tuple[int, int]]:
    """(nanosecond, bytes) of every allocation and release; negative bytes for a release."""
    inner: Any = watch.profiler  # the events' accessors are not in PyTorch's type stubs
    return [(e.start_ns(), e.nbytes()) for e in inner.kineto_results.events() if e.name() == "[memory]"]


def _highest_sum(events: list[tuple[int, int]]) -> int:
    """Highest running sum of the bytes of (time, bytes) events; simultaneous ones in the order recorded."""
    level = highest = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        level += size
        highest = max(highest, level)
    return highest


def _reset_high_water() -> bool:
    """Reset VmHWM (proc(5), clear_refs); False if that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tensor_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages of `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def resident_bytes() -> int:
    """Bytes of this process in the host's memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
