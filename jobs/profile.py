"""A profile of a model's pass: which kernels take its time and its memory, and where the host waits for the device.

A point is one implementation, pass and length. It is checked against the oracle, timed without the profiler, and then
profiled once; tables, trace and the allocator's snapshot are kept with it.
"""

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage] - its profiler rows have it
from torch.profiler import ProfilerActivity, profile

from jobs.measure.call import measure_call
from jobs.measure.clock import TimingSpec, synchronize
from jobs.measure.passes import ModelPass, PassCase, PassSpec
from jobs.schema.point import Beat, Measurement, Metric
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, TIME, Better, Quantity, Role
from nsa_core.routes import RANGE

BUSY_TIME = Quantity("busy_time", "ms", "Time in which the device computed", "busy", Better.LOWER, Role.HEADLINE)
SYNCHRONIZATIONS = Quantity(
    "synchronizations", "1", "Waits of the host for the device", "waits", Better.LOWER, Role.HEADLINE
)
RANGE_TIME = Quantity("range_*", "ms", "Time of branch or stage")
QUANTITIES = (TIME, BUSY_TIME, SYNCHRONIZATIONS, RANGE_TIME, *MEMORY, *AGREEMENT, *TELEMETRY)

_ROWS = 40  # of a table
_HISTORY = 200_000  # allocations and releases that a snapshot holds


Case = PassCase


class Spec(PassSpec):
    """Lengths x passes x implementations of one model, each profiled."""

    kind: Literal["profile"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    timing: TimingSpec = Field(default=TimingSpec(), description="of the pass without the profiler")


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the model, time its pass, and profile it once. Raises as measure_call.

    The trace is read by Perfetto and chrome://tracing.
    """
    call, measured = measure_call(case, lambda: ModelPass(case), beat, throughput=None)
    beat("profile")
    device, cuda, waits = call.device, call.device.type == "cuda", Counter[str]()
    folder = Path(tempfile.mkdtemp(prefix="profile-"))
    trace, snapshot = folder / "trace.json.gz", folder / "memory_snapshot.pickle"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    if cuda:
        waits = _waits(call.run, device)
        torch.cuda.memory._record_memory_history(max_entries=_HISTORY, device=device)
    with profile(activities=activities, profile_memory=True, record_shapes=True, acc_events=True) as watch:
        call.run()
        synchronize(device)
    watch.export_chrome_trace(str(trace))
    side, rows = "device" if cuda else "cpu", watch.key_averages()
    files: dict[str, Any] = {**measured.files, trace.name: trace}
    for what, column in (("time", "time_total"), ("memory", "memory_usage")):
        files[f"by_{what}.txt"] = rows.table(sort_by=f"self_{side}_{column}", row_limit=_ROWS)
    busy, ranges = times_ms(rows, cuda)
    method = "self times of all kernels of one call, by torch.profiler"
    metrics = [*measured.metrics, Metric.of(BUSY_TIME, busy, method=method)]
    metrics += [Metric.of(RANGE_TIME.named(name), ms, method="by torch.profiler") for name, ms in ranges.items()]
    if cuda:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
        files[snapshot.name] = snapshot
        files["synchronizations.txt"] = "".join(f"{count:6} {line}\n" for line, count in waits.most_common())
        method = "warnings of torch.cuda.set_sync_debug_mode, one call"
        metrics.append(Metric.of(SYNCHRONIZATIONS, waits.total(), method=method))
    return replace(measured, metrics=tuple(metrics), files=files)


def times_ms(rows: Sequence[Any], cuda: bool) -> tuple[float, dict[str, float]]:
    """Time of all kernels, and of those launched in each range of nsa_core.routes: the branches computed at once
    ("cmp_slc_win"), and stages ("merge") within, which count in both. On a CPU of operations instead of kernels.
    """
    ranges = [row for row in rows if row.key.startswith(RANGE) and row.device_type == DeviceType.CPU]
    if cuda:
        # A kernel's time is in two rows, its own and that of the operation that launched it; that of a range, too.
        kernels = [row for row in rows if row.device_type != DeviceType.CPU and not row.is_user_annotation]
        busy = sum(row.self_device_time_total for row in kernels)
    else:
        busy = sum(row.self_cpu_time_total for row in rows)
    times = {row.key.removeprefix(RANGE): row.device_time_total if cuda else row.cpu_time_total for row in ranges}
    return busy / 1000, {name: time / 1000 for name, time in times.items()}


def _waits(call: Callable[[], object], device: torch.device) -> Counter[str]:
    """Waits for the device within a call, by the line of code, as PyTorch's debug mode warns of them."""
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = (warning for warning in caught if "synchronizing CUDA operation" in str(warning.message))
    return Counter(f"{wait.filename}:{wait.lineno}" for wait in waits)
