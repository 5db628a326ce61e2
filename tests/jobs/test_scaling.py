"""The scaling kind, with real measurements of small cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from travelling import travelled

from jobs.measure import check
from jobs.measure.check import WrongResult
from jobs.scaling import Spec, measure
from jobs.schema.point import Machine, Measurement, Point
from nsa_core.backends import BACKENDS, chunked
from nsa_core.memory import MemoryEstimate

CPU = Machine("cpu", "test processor", 8 * 2**30)
NSA = {"cmp_block": 8, "cmp_stride": 4, "slc_block": 8, "slc_count": 4, "window": 16}
QUICK = {"repeats": 2, "min_s": 0, "max_s": 2, "warmup": 1}


def _spec(**changes: Any) -> Spec:
    data: dict[str, Any] = {
        "kind": "scaling",
        "name": "t",
        "implementations": ["chunked", "naive", "dense"],
        "lengths": [64],
        "shape": {"query_heads": 4, "kv_heads": 2, "head_dim": 8},
        "nsa": NSA,
        "timing": QUICK,
    }
    data |= changes
    if data["implementations"] == ["dense"] and "nsa" not in changes:
        del data["nsa"]  # which would change nothing
    return Spec.model_validate(data)


def _quiet(phase: str, done: int = 0, total: int = 0) -> None:
    pass


def _measure(point: Point) -> Measurement:
    return measure(travelled(point), _quiet)  # as it travels to a worker


def _values(result: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in result.metrics}


@pytest.fixture(autouse=True)
def _forget_agreements() -> None:
    check.check_attention.cache_clear()
    check.check_model.cache_clear()


def test_points_are_the_whole_grid_shortest_first() -> None:
    points = _spec(lengths=[128, 64]).points(CPU)
    assert len(points) == 2 * 2 * 3
    assert [p.axes.seq_len for p in points] == [64] * 6 + [128] * 6
    assert points[0].label == "chunked forward S=64"
    assert points[0].axes.query_heads == 4
    assert all(p.estimate_bytes for p in points)
    assert all(p.skip_reason is None for p in points)


@pytest.mark.parametrize(
    "changes", [{}, {"workload": "model", "shape": None, "preset": "tiny"}], ids=["attention", "model"]
)
def test_a_configuration_holds_all_settings_of_the_measurement(changes: dict[str, Any]) -> None:
    for point in _spec(**changes).points(CPU):
        case = travelled(point)
        assert case == point.case
        given = (point.axes.query_heads, point.axes.kv_heads, point.axes.head_dim, point.axes.seq_len)
        assert (case.model.heads, case.model.kv_heads, case.model.head_dim, case.seq_len) == given
        assert case.implementation.startswith("dense") or case.model.nsa.slc_block == NSA["slc_block"]


def test_points_that_do_not_fit_are_skipped_with_the_arithmetic() -> None:
    points = _spec(lengths=[64, 65536], memory_gib=2, passes=["forward"]).points(CPU)
    skipped = {p.label: p.skip_reason for p in points if p.skip_reason}
    assert list(skipped) == ["naive forward S=65536"]
    reason = skipped["naive forward S=65536"]
    assert reason is not None
    assert reason.startswith("needs ")
    assert reason.endswith("GiB, memory_gib allows 2 GiB; shorten lengths or use chunked")
    small = Machine("cuda", "small card", 2**20)
    assert "the cuda device has 1 MiB" in str(_spec(lengths=[8192]).points(small)[0].skip_reason)


@pytest.mark.parametrize("workload", ["attention", "model"])
def test_a_backend_without_a_memory_prediction_is_measured(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nsa_core.backends.BACKENDS", "nsa_core.backends.WINDOW_BACKENDS"):
        monkeypatch.setattr(name, dict(BACKENDS) | {"new": chunked})
    shape = {"shape": None, "preset": "tiny"} if workload == "model" else {}
    point = _spec(implementations=["new"], workload=workload, passes=["forward"], memory_gib=1e-6, **shape).points(CPU)[
        0
    ]
    assert (point.estimate_bytes, point.skip_reason) == (None, None)
    assert "estimate_error" not in _values(_measure(point))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("workload", ["attention", "model"])
def test_the_kernels_memory_is_predicted_for_a_gpu_that_is_elsewhere(workload: str) -> None:
    spec = _spec(implementations=["triton"], preset="m7c_125m", shape=None, nsa=None, workload=workload,
                 dtype="bfloat16", lengths=[2048, 2**20], passes=["forward+backward"])  # fmt: skip
    short, long = spec.points(Machine("cuda", "card", 8 * 2**30))
    assert short.skip_reason is None
    assert short.estimate_bytes is not None
    assert "the cuda device has 8 GiB" in str(long.skip_reason)


def test_the_key_ignores_what_dense_attention_does_not_use() -> None:
    def key(window: int, implementation: str) -> str:
        implementations = list(dict.fromkeys([implementation, "chunked"]))
        spec = _spec(nsa=NSA | {"window": window}, implementations=implementations)
        return spec.points(CPU)[0].key("code", CPU)

    assert key(16, "dense") == key(32, "dense")
    assert key(16, "chunked") != key(32, "chunked")


@pytest.mark.parametrize("pass_", ["forward", "forward+backward"])
@pytest.mark.parametrize("implementation", ["chunked", "naive", "reference", "dense"])
def test_a_point_brings_time_memory_agreement_and_its_route(implementation: str, pass_: str) -> None:
    point = _spec(implementations=[implementation], passes=[pass_]).points(CPU)[0]
    result = _measure(point)
    found = _values(result)
    assert found["time"] > 0
    samples = {metric.name: metric.samples for metric in result.metrics}
    assert samples["throughput"] == pytest.approx([64 / ms * 1000 for ms in samples["time"]])
    output = 64 * 4 * 8 * 4
    assert found["peak_extra_memory"] >= (2 if pass_ == "forward+backward" else 1) * output / 2**20
    assert found["peak_memory"] > found["peak_extra_memory"]
    assert 0 <= found["oracle_error"] <= found["oracle_error_bound"] < 1e-4
    assert abs(found["estimate_error"]) < 30, "within 10 % at lengths that matter; see tests/nsa_core"
    if implementation == "dense":
        assert set(result.route) == {"dense"}
    else:
        assert result.route == dict.fromkeys(("cmp", "slc", "win", "select"), implementation)
    assert result.environment["packages"]["torch"]


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_whole_model_is_measured_with_all_its_gradients(implementation: str) -> None:
    spec = _spec(workload="model", shape=None, nsa=None, preset="tiny", implementations=[implementation])
    forward, both = (_values(_measure(point)) for point in spec.points(CPU))
    parameters = 132_952 if implementation == "chunked" else 115_008
    assert both["peak_extra_memory"] >= parameters * 4 / 2**20
    assert forward["peak_extra_memory"] < both["peak_extra_memory"]
    assert both["oracle_error"] <= both["oracle_error_bound"]
    assert spec.points(CPU)[0].axes.layers == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_of_chunked_grows_as_s_and_of_naive_as_s_squared(dtype: str) -> None:
    lengths = [256, 512, 1024]
    nsa = {"cmp_block": 16, "cmp_stride": 8, "slc_block": 32, "slc_count": 4, "window": 64}
    spec = _spec(lengths=lengths, passes=["forward"], implementations=["chunked", "naive"], nsa=nsa, dtype=dtype)
    points = spec.points(CPU)
    extra = {p.label: _values(_measure(p))["peak_extra_memory"] for p in points}

    def exponent(name: str) -> float:
        values = [extra[f"{name} forward S={s}"] for s in lengths]
        return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])

    assert exponent("chunked") <= 1.15
    assert exponent("naive") >= 1.7


def _off_by(share: float) -> Callable[..., torch.Tensor]:
    right = chunked.window
    return lambda *args: right(*args) * (1 + share)


def test_a_wrong_implementation_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "window", _off_by(1e-3))
    phases: list[str] = []
    point = _spec(implementations=["chunked"], passes=["forward"]).points(CPU)[0]
    with pytest.raises(WrongResult, match=r"chunked: output is off by .* of the oracle's largest value"):
        measure(point.case, lambda phase, done=0, total=0: phases.append(phase))
    assert phases == ["check"]


def test_a_wrong_gradient_is_found_though_the_output_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.window

    def detached(q: Any, k: Any, *rest: Any) -> Any:
        return right(q, k.detach(), *rest)

    monkeypatch.setattr(chunked, "window", detached)
    forward, both = _spec(implementations=["chunked"]).points(CPU)
    measure(forward.case, _quiet)
    with pytest.raises(WrongResult, match="gradient of k"):
        measure(both.case, _quiet)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_wrong_though_the_output_is_right(bad: float) -> None:
    truth = {"output": torch.ones(3, dtype=torch.float64), "gradient of q": torch.ones(3, dtype=torch.float64)}
    right = {name: x.float() for name, x in truth.items()}
    got = right | {"gradient of q": torch.tensor([1.0, bad, 1.0])}
    for eager in (right, got):
        with pytest.raises(WrongResult, match="gradient of q is off by inf"):
            check.judge(got, eager, truth, torch.float32, "case", "name")


def test_a_wrong_selection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.select

    def shuffled(*args: Any) -> torch.Tensor:
        blocks = right(*args)
        return torch.where(blocks == 2, blocks + 1, blocks)

    monkeypatch.setattr(chunked, "select", shuffled)
    point = _spec(implementations=["chunked"], passes=["forward"]).points(CPU)[0]
    with pytest.raises(WrongResult, match="selects other blocks than the oracle"):
        measure(point.case, _quiet)


def test_a_selection_that_is_wrong_far_into_the_sequence_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.select

    def last_seen(*args: Any) -> torch.Tensor:
        blocks = right(*args)
        blocks[:, 64:, :, 1] = blocks[:, 64:, :, 2] - 1  # a neighbour of the local blocks, whatever its score
        return blocks

    monkeypatch.setattr(chunked, "select", last_seen)
    point = _spec(implementations=["chunked"], passes=["forward"]).points(CPU)[0]
    with pytest.raises(WrongResult, match="selects other blocks than the oracle"):
        measure(point.case, _quiet)


def test_a_model_with_a_learned_compression_is_measured() -> None:
    nsa = NSA | {"compress": "mlp"}
    spec = _spec(workload="model", shape=None, nsa=nsa, preset="tiny", implementations=["chunked"])
    for point in spec.points(CPU):
        found = _values(_measure(point))
        assert found["oracle_error"] <= found["oracle_error_bound"]


def test_the_estimate_error_is_relative_to_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    point = _spec(implementations=["dense"], passes=["forward"]).points(CPU)[0]
    measured = _values(_measure(point))["peak_extra_memory"] * 2**20
    double = MemoryEstimate(0, 0, 0, 0, int(2 * measured), 0)
    monkeypatch.setattr("jobs.measure.operator.estimate_attention", lambda *args, **kwargs: double)
    assert _values(_measure(point))["estimate_error"] == pytest.approx(100)
