"""The kinds profile and capacity, on small models."""

from __future__ import annotations

import gzip
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from supervised import Ended, supervised
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from jobs import capacity, profile
from jobs.capacity import NothingFits, search
from jobs.measure import profiler
from jobs.schema.point import Machine, Measurement, Point
from jobs.schema.states import PointState
from orchestrator.messages import Conditions

CPU = Machine("cpu", "test processor", 8 * 2**30)


def _quiet(phase: str, done: int = 0, total: int = 0) -> None:
    pass


def _values(result: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in result.metrics}


def _travelled(point: Point) -> dict[str, Any]:
    return json.loads(json.dumps(point.config))


def _profile(implementation: str = "chunked") -> Measurement:
    timing = {"repeats": 1, "min_s": 0, "max_s": 2, "warmup": 1}
    data: dict[str, Any] = {"kind": "profile", "name": "t", "preset": "tiny", "implementations": [implementation]}
    spec = profile.Spec.model_validate(
        data | {"passes": ["forward+backward"], "lengths": [64], "timing": timing},
    )
    (point,) = spec.points(CPU)
    return profile.measure(_travelled(point), _quiet)


def _column(table: str, title: str) -> list[float]:
    """A column of a profiler's table, in microseconds or bytes."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    titles = next(row for row in rows if row[0] == "Name")
    cells = [row[titles.index(title)] for row in rows if len(row) == len(titles) and row[0][0] not in "-N"]
    units = {"us": 1, "ms": 1e3, "s": 1e6, "b": 1, "B": 1, "Kb": 2**10, "KB": 2**10, "Mb": 2**20, "MB": 2**20}
    found = [re.fullmatch(r"(-?[\d.]+) ?(\w+)", cell) for cell in cells]
    return [float(match[1]) * units[match[2]] for match in found if match]


@pytest.mark.parametrize("implementation", ["gather", "naive", "packed", "reference"])
def test_each_branch_has_its_range(implementation: str) -> None:
    ranges = {name: ms for name, ms in _values(_profile(implementation)).items() if name.startswith("range_")}
    assert ranges.keys() == {"range_cmp", "range_slc", "range_win", "range_select"}
    assert 0 < ranges["range_select"] < ranges["range_slc"]  # which chooses its blocks
    assert min(ranges.values()) > 0


def test_a_profile_keeps_tables_and_a_trace_with_the_branches() -> None:
    result = _profile()
    values = _values(result)
    assert values["busy_time"] > 0
    assert {"range_cmp", "range_slc", "range_win", "range_select"} <= set(values)
    assert "synchronizations" not in values  # of a CPU
    for name, title in (("by_time.txt", "Self CPU"), ("by_memory.txt", "Self CPU Mem")):
        column = _column(str(result.files[name]), title)
        assert len(column) >= 20
        assert column == sorted(column, reverse=True)
        assert column[0] > column[-1]
    trace = Path(result.files["trace.json.gz"])
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"nsa_core.cmp", "nsa_core.slc", "nsa_core.win", "nsa_core.select"} <= names


def _event(name: str, start: int, end: int, device: DeviceType, *, is_range: bool = False) -> FunctionEvent:
    times: Any = {"start_us": start, "end_us": end, "use_device": "cuda", "device_type": device, "stack": []}
    return FunctionEvent(id=start, name=name, thread=0, is_user_annotation=is_range, **times)


def test_a_kernel_counts_once_though_a_profile_of_a_gpu_has_it_in_several_rows() -> None:
    """PyTorch's own summary of a kernel of 30 µs, its operation, and a range around both on host and GPU."""
    name, cpu, cuda = "nsa_core.win", DeviceType.CPU, DeviceType.CUDA
    host, operation = _event(name, 0, 100, cpu, is_range=True), _event("aten::mm", 10, 20, cpu)
    operation.append_kernel("gemm", 0, 30)
    host.append_cpu_child(operation)
    device = [_event("gemm", 50, 80, cuda), _event(name, 45, 95, cuda, is_range=True)]
    events = EventList([host, operation, *device], use_device="cuda")
    events._tree_built = True
    rows = events.key_averages()
    assert profiler.busy_ms(rows, cuda=True) == pytest.approx(0.03)
    assert profiler.ranges_ms(rows, cuda=True) == {"win": pytest.approx(0.03)}


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
    assert profiler.ranges_ms(rows, cuda=True) == pytest.approx({"cmp_win": 0.042, "window": 0.03, "merge": 0.012})
    assert profiler.busy_ms(rows, cuda=True) == pytest.approx(0.042)


class _NoCard:
    """Stands for torch.cuda: holds the debug mode of synchronisation."""

    def __init__(self) -> None:
        self.mode: int | str = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))


def test_waits_for_the_device_are_counted_by_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _NoCard()
    card.install(monkeypatch)

    def call() -> None:
        assert card.mode == "warn"
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as PyTorch says it
        warnings.warn("something else", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    first = call.__code__.co_firstlineno
    waits = profiler._waits(call, torch.device("cuda"))
    assert waits == {f"{__file__}:{first + 3}": 3, f"{__file__}:{first + 5}": 1}
    assert card.mode == 0

    def broken() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        profiler._waits(broken, torch.device("cuda"))
    assert card.mode == 0


def test_the_metric_is_the_sum_of_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiler.Profile(1.0, {}, {"a.py:1": 3, "b.py:2": 1}, {})
    monkeypatch.setattr(profile, "profile_call", lambda *_: found)
    assert _values(_profile())["synchronizations"] == 4


@pytest.mark.parametrize("guess", range(5))
@pytest.mark.parametrize("last", [None, 0, 2, 4])
def test_the_search_ends_at_the_last_that_fits(guess: int, last: int | None) -> None:
    tried: list[int] = []

    def fits(place: int) -> bool:
        tried.append(place)
        return last is not None and place <= last

    assert search(fits, 5, guess) == last
    assert len(tried) == len(set(tried))
    if last is not None and last < 4:
        assert last + 1 in tried  # shown to fail


def _capacity(monkeypatch: pytest.MonkeyPatch, train: Callable[[Any], Any], **changes: Any) -> dict[str, float]:
    data: dict[str, Any] = {"kind": "capacity", "name": "t", "preset": "tiny", "implementations": ["dense"]}
    spec = capacity.Spec.model_validate(data | {"lengths": [32, 64, 128], "checkpointing": [False]} | changes)
    (point,) = spec.points(CPU)
    monkeypatch.setattr(capacity, "_train", train)
    return _values(capacity.measure(_travelled(point), _quiet))


def test_capacity_shows_the_next_longer_one_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = capacity._train

    def scarce(config: Any) -> Any:
        if config["seq_len"] > 64:
            raise MemoryError
        return real(config)

    found = _capacity(monkeypatch, scarce)
    assert (found["longest"], found["longest_predicted"], found["shortest_failed"]) == (64, 128, 128)
    assert found["throughput"] > 0
    assert found["peak_memory"] > 0


def test_a_length_that_was_not_predicted_to_fit_is_not_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that holds the weights and the optimizer's state, and by the prediction no step of any length."""
    found = _capacity(monkeypatch, capacity._train, memory_gib=0.0015, lengths=[64])
    assert (found["longest"], found.get("longest_predicted")) == (64, None)


def test_capacity_stops_at_a_limit_that_is_enforced(tmp_path: Path) -> None:
    """Measured in a child with 256 MiB: the masks of 2,048 tokens do not fit, those of 64 do, as predicted."""
    data: dict[str, Any] = {"kind": "capacity", "name": "t", "preset": "tiny", "implementations": ["naive"]}
    spec = capacity.Spec.model_validate(data | {"lengths": [64, 2048], "checkpointing": [False], "memory_gib": 0.25})
    conditions = Conditions("cpu", spec.deadlines, memory_bytes=2**28)  # as of the spec's run
    (ended,) = [u for u in supervised(spec.points(CPU), conditions, tmp_path) if isinstance(u, Ended)]
    assert ended.outcome.state == PointState.OK, ended.outcome.reason
    found = {metric.name: metric.value for metric in ended.outcome.metrics}
    assert (found["longest"], found["longest_predicted"], found["shortest_failed"]) == (64, 64, 2048)
    assert 0 < found["peak_memory"] < 256


PLAN = {"steps": 1000, "tokens_per_step": 3600, "hours": 1.0}  # needs 1,000 tok/s


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({32: 3000, 64: 2000, 128: 1000}, 128),  # all fit and are fast enough
        ({32: 3000, 64: 2000, 128: 999}, 64),
        ({32: 3000, 64: 999}, 32),  # 128 does not fit
        ({32: 998, 64: 999, 128: 997}, None),
    ],
)
def test_a_length_too_slow_for_the_plan_does_not_count(
    monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], expected: int | None
) -> None:
    real = capacity._train

    def paced(config: Any) -> Any:
        if config["seq_len"] not in rates:
            raise MemoryError
        return replace(real(config), per_second=(1.0, rates[config["seq_len"]], 9000.0))

    warned: list[str] = []
    monkeypatch.setattr(capacity, "reporter", lambda beat: SimpleNamespace(warn=warned.append))
    found = _capacity(monkeypatch, paced, plan=PLAN)
    assert found["longest"] == max(rates)
    assert found["throughput_needed"] == pytest.approx(1000)
    assert found.get("longest_in_plan") == expected
    slow = "plan: no length that fits trains at the 1,000 tok/s that it needs; the fastest, S=64, at 999"
    assert warned == ([] if expected else [slow])


def test_a_plan_is_a_part_of_a_point_only_where_there_is_one() -> None:
    data: dict[str, Any] = {"kind": "capacity", "name": "t", "preset": "tiny", "implementations": ["dense"]}
    without, planned = (capacity.Spec.model_validate(data | {"lengths": [32]} | more) for more in ({}, {"plan": PLAN}))
    assert "plan" not in without.model_dump(mode="json") | dict(without.points(CPU)[0].config)
    assert capacity.Spec.model_validate(planned.model_dump(mode="json")) == planned
    assert without.points(CPU)[0].key("code", CPU) != planned.points(CPU)[0].key("code", CPU)
    with pytest.raises(ValueError, match="contradicts 1,000 steps of 3,600 tokens"):
        capacity.Spec.model_validate(data | {"lengths": [32], "plan": PLAN | {"tokens_per_second": 50}})


def test_capacity_of_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(config: Any) -> Any:
        raise MemoryError

    with pytest.raises(NothingFits, match="lengths: 32: the shortest runs out of memory"):
        _capacity(monkeypatch, scarce)


def test_a_limit_below_the_weights_alone_skips_the_point_with_the_arithmetic() -> None:
    data = {"kind": "capacity", "name": "t", "preset": "tiny", "implementations": ["dense", "gather"], "lengths": [32]}
    dense, unpredicted = capacity.Spec.model_validate(data | {"checkpointing": [False], "memory_gib": 1e-6}).points(CPU)
    assert re.fullmatch(r"needs 1\.\d+ MiB, memory_gib allows 1\.048 KiB; raise the limit, .*", str(dense.skip_reason))
    assert unpredicted.skip_reason is None
