"""Peak memory of a call beyond the memory allocated before it: outputs and gradients count, inputs do not.

Measured in a separate run, after the call ran at least once (so that libraries have allocated their workspaces).
CUDA: the caching allocator's counters. CPU: the allocator's own events, so the peak is exact to the byte and does not
depend on memory that the C library keeps.
"""

import gc
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from jobs.schema.point import Metric
from jobs.schema.quantities import PEAK_DRIVER, PEAK_EXTRA_MEMORY, PEAK_MEMORY, PEAK_RESERVED, PEAK_RSS


@dataclass(frozen=True)
class Peak:
    """Bytes at the call's peak."""

    extra: int  # beyond those allocated before the call
    allocated: int  # of all tensors together
    held: int  # by the process: CUDA's reserved memory; on CPU the high-water mark of the resident set
    method: str  # description of the measurement
    driver: int | None = None  # in use on the card as the driver counts it, other processes included; None on CPU
    files: dict[str, str] = field(default_factory=dict)  # reports of the allocator

    def metrics(self) -> list[Metric]:
        """Metrics of the peak in MiB."""
        held = PEAK_RSS if self.driver is None else PEAK_RESERVED
        found = [(PEAK_EXTRA_MEMORY, self.extra), (PEAK_MEMORY, self.allocated), (held, self.held)]
        found += [] if self.driver is None else [(PEAK_DRIVER, self.driver)]
        return [Metric.of(quantity, size / 2**20, method=self.method) for quantity, size in found]


def graph_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the memory that this process's CUDA graphs were captured in, which stays theirs; and of the part that
    the allocator counts as free, though every replay writes to it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    here = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    segments = [segment for segment in here if tuple(segment["segment_pool_id"]) != (0, 0)]
    held = sum(segment["total_size"] for segment in segments)
    return held, held - sum(segment["allocated_size"] for segment in segments)


def measure_held(call: Callable[[], object], device: torch.device, resident: int) -> int:
    """Run `call` once; returns the bytes of all tensors while its result is alive. `resident` as in measure_peak."""
    gc.collect()
    if device.type != "cuda":
        return resident + sum(_allocations(call))
    result = call()
    held = torch.cuda.memory_allocated(device)
    del result
    return held


def measure_peak(call: Callable[[], object], device: torch.device, resident: int, *, cuda_graphs: bool = False) -> Peak:
    """Run `call` once and measure its peak memory; its result stays alive until the end. `resident` are bytes of
    tensors allocated before (on a CPU: CUDA counts them itself); with `cuda_graphs` it uses this process's graphs.
    """
    gc.collect()
    if device.type != "cuda":
        return _peak_on_cpu(call, resident)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    graphs = graph_memory(device)[1] if cuda_graphs else 0
    allocated = torch.cuda.max_memory_allocated(device) + graphs
    free, total = torch.cuda.mem_get_info(device)
    files = {"memory_summary.txt": torch.cuda.memory_summary(device)}
    del result
    also = " and the memory of CUDA graphs that it leaves out" if cuda_graphs else ""
    method = f"CUDA caching allocator, one run: max_memory_allocated{also} minus memory_allocated before it"
    return Peak(allocated - before, allocated, torch.cuda.max_memory_reserved(device), method, total - free, files)


def _peak_on_cpu(call: Callable[[], object], resident: int) -> Peak:
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
        since = "during the run (profiler included)"
    except OSError:
        since = "since the process began"
    level = extra = 0
    for size in _allocations(call):
        level += size
        extra = max(extra, level)
    try:
        mark = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    except OSError:
        mark = None
    rss = int(mark[1]) if mark else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method = f"events of PyTorch's CPU allocator, one run; resident set: high-water mark {since}"
    return Peak(extra, resident + extra, rss * 1024, method)


def _allocations(call: Callable[[], object]) -> list[int]:
    """Bytes of every allocation of one run, negative of every release, in order of time; its result counts as alive."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        result = call()
    inner: Any = watch.profiler  # the events' accessors are not in PyTorch's type stubs
    events = [(e.start_ns(), e.nbytes()) for e in inner.kineto_results.events() if e.name() == "[memory]"]
    del result
    return [size for _, size in sorted(events, key=lambda event: event[0])]


def tensor_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages of `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def resident_bytes() -> int:
    """Bytes of this process in the host's memory now."""
    return psutil.Process().memory_info().rss
