"""The kind profile, on small models, and the bench's stages from hand-made profiles."""

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from travelling import CPU, QUICK, measured, values_of

from jobs import profile
from jobs.bench import Kernel, ProfileError, by_stage, summarize_stages
from jobs.specs.load import parse_spec
from nsa_core.kernels.runtime.launch import Started


def test_a_profile_keeps_tables_and_a_trace_with_the_branches() -> None:
    data: dict[str, Any] = {"kind": "profile", "name": "t", "preset": "tiny", "implementations": ["chunked"]}
    (point,) = parse_spec(data | {"passes": ["forward+backward"], "lengths": [64], "timing": QUICK}).points(CPU)
    result = measured(point)
    values = values_of(result)
    assert values["busy_time"] > 0
    assert {"range_cmp", "range_slc", "range_win", "range_select"} <= set(values)
    assert "synchronizations" not in values  # of a CPU
    assert all("aten::" in str(result.files[name]) for name in ("by_time.txt", "by_memory.txt"))
    trace = Path(result.files["trace.json.gz"])
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"nsa_core.cmp", "nsa_core.slc", "nsa_core.win", "nsa_core.select"} <= names


def _event(name: str, start: int, end: int, device: DeviceType, *, is_range: bool = False) -> FunctionEvent:
    times: Any = {"start_us": start, "end_us": end, "use_device": "cuda", "device_type": device, "stack": []}
    return FunctionEvent(id=start, name=name, thread=0, is_user_annotation=is_range, **times)


def test_a_kernel_in_nested_ranges_counts_in_each_once() -> None:
    """As the Triton kernels are seen: branches, autograd's function, the stages of two launches, one kernel each."""
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    branches, function = _event("nsa_core.cmp_win", 0, 100, cpu, is_range=True), _event("_Attend", 5, 95, cpu)
    stages = [_event(f"nsa_core.{name}", start, start + 10, cpu) for name, start in (("window", 10), ("merge", 30))]
    for stage, microseconds in zip(stages, (30, 12), strict=True):
        stage.append_kernel("kernel", 0, microseconds)
        function.append_cpu_child(stage)
    branches.append_cpu_child(function)
    kernels = [_event("kernel", 50, 80, cuda), _event("kernel", 80, 92, cuda)]
    events = EventList([branches, function, *stages, *kernels], use_device="cuda")
    events._tree_built = True
    rows = events.key_averages()
    busy, ranges = profile.times_ms(rows, cuda=True)
    assert busy == pytest.approx(0.042)
    assert ranges == pytest.approx({"cmp_win": 0.042, "window": 0.03, "merge": 0.012})


def test_waits_for_the_device_are_counted_by_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int | str] = [0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        assert modes[-1] == "warn"
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as PyTorch says it
        warnings.warn("something else", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    first = call.__code__.co_firstlineno
    waits = profile._waits(call, torch.device("cuda"))
    assert waits == {f"{__file__}:{first + 3}": 3, f"{__file__}:{first + 5}": 1}
    assert modes[-1] == 0


def _launches(*kernels: str, stage: str = "merge") -> list[Started]:
    return [Started(kernel, stage, {}) for kernel in kernels]


def test_kernels_are_told_apart_by_the_order_of_their_launches() -> None:
    launches = [
        *_launches("_span_backward_kv", stage="compressed_backward_kv"),
        *_launches("_new", stage="new"),
        *_launches("_span_backward_kv", stage="window_backward_kv"),
    ]
    kernels = [
        Kernel("_span_backward_kv", start=50, duration=7),  # the profiler's order is not the device's
        Kernel("sort<int>", start=20, duration=3),
        Kernel("_span_backward_kv", start=10, duration=5),
        Kernel("_new", start=30, duration=2),
    ]
    assert by_stage(kernels, launches) == {
        ("compressed_backward_kv", "_span_backward_kv"): 5,
        ("other", "sort<int>"): 3,
        ("new", "_new"): 2,
        ("window_backward_kv", "_span_backward_kv"): 7,
    }


@pytest.mark.parametrize(
    ("seen", "launched", "message"),
    [
        ([], [], "none of the project's kernels ran"),
        (["_merge"], ["_merge", "_merge"], "lacks launches of _merge"),
        (["_merge", "_merge"], ["_merge"], "has _merge more often"),
    ],
)
def test_an_incomplete_profile_is_refused(seen: list[str], launched: list[str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        by_stage([Kernel(name, i, 1) for i, name in enumerate(seen)], _launches(*launched))


def test_stages_are_medians_longest_first() -> None:
    profiles = [
        by_stage([Kernel("_merge", 0, gate * 10**6), Kernel("fill", 1, 10**6)], _launches("_merge"))
        for gate in (3, 9, 5)
    ]
    (merge, other), text = summarize_stages(profiles)
    assert (merge.name, merge.unit, merge.value, merge.samples) == ("stage_merge", "ms", 5.0, (3.0, 9.0, 5.0))
    assert (other.name, other.value) == ("stage_other", 1.0)
    assert "5.0000 ms  merge" in text
