"""The decode kind, with real measurements of small cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from travelling import travelled

from jobs import decode
from jobs.decode import Spec, bytes_read, held_bytes, measure
from jobs.measure.check import WrongResult
from jobs.schema.point import Machine, Measurement, Point
from nsa_core import NSAConfig
from nsa_core.model import PRESETS

CPU = Machine("cpu", "test processor", 8 * 2**30)
NSA = {"cmp_block": 8, "cmp_stride": 4, "slc_block": 8, "slc_count": 4, "window": 16}


def _spec(**changes: Any) -> Spec:
    data: dict[str, Any] = {
        "kind": "decode",
        "name": "t",
        "implementations": ["chunked", "dense"],
        "lengths": [64],
        "batch": 2,
        "layers": 3,
        "shape": {"query_heads": 4, "kv_heads": 2, "head_dim": 8},
        "nsa": NSA,
        "timing": {"repeats": 2, "min_s": 0, "max_s": 2, "warmup": 1},
    }
    data |= changes
    if data["implementations"] == ["dense"] and "nsa" not in changes:
        del data["nsa"]  # which would change nothing
    return Spec.model_validate(data)


def _measure(point: Point) -> Measurement:
    return measure(travelled(point), lambda *_: None)  # as it travels to a worker


def _values(result: Measurement) -> dict[str, float]:
    return {metric.name: metric.value for metric in result.metrics}


def test_points_are_the_whole_grid_shortest_first() -> None:
    points = _spec(lengths=[128, 64]).points(CPU)
    assert [p.label for p in points] == [f"{name} decode S={s}" for s in (64, 128) for name in ("chunked", "dense")]
    axes = points[0].axes
    assert (axes.pass_, axes.seq_len, axes.batch, axes.layers) == ("decode", 64, 2, 3)


@pytest.mark.parametrize("changes", [{}, {"workload": "model", "preset": "tiny", "shape": None, "layers": 3}])
def test_a_configuration_holds_all_settings_of_the_measurement(changes: dict[str, Any]) -> None:
    for point in _spec(**changes).points(CPU):
        case = travelled(point)
        assert case == point.case
        given = (point.axes.query_heads, point.axes.kv_heads, point.axes.head_dim, point.axes.layers)
        assert (case.model.heads, case.model.kv_heads, case.model.head_dim, case.model.layers) == given
        assert (case.model.attention == "dense") == (point.axes.implementation == "dense")
        assert case.model.attention == "dense" or case.model.nsa.slc_block == NSA["slc_block"]


@pytest.mark.parametrize("length", [1, 3, 64, 101])
@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_point_brings_time_bytes_agreement_and_its_route(implementation: str, length: int) -> None:
    result = _measure(_spec(implementations=[implementation], lengths=[length]).points(CPU)[0])
    found = _values(result)
    samples = {metric.name: metric.samples for metric in result.metrics}
    assert samples["throughput"] == pytest.approx([2 / ms * 1000 for ms in samples["time"]])
    assert found["bytes_read"] > 0
    assert 0 <= found["oracle_error"] <= found["oracle_error_bound"] < 1e-4
    branches = (
        {"dense"} if implementation == "dense" else {"select", "slc", "win"} | ({"cmp"} if length >= 8 else set())
    )
    assert set(result.route) == branches
    assert "eager" in result.metrics[0].method


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_every_step_sees_the_same_context(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context stays the point's, however many steps are timed."""
    held: list[int] = []
    step = decode._step

    def watched(case: Any, token: Any, cache: Any) -> torch.Tensor:
        out = step(case, token, cache)
        held.append(cache.length)
        return out

    monkeypatch.setattr(decode, "_step", watched)
    timing = {"repeats": 20, "min_s": 0, "max_s": 2, "warmup": 1}
    _measure(_spec(implementations=[implementation], lengths=[77], timing=timing).points(CPU)[0])
    assert held.count(77) >= 20 * 3  # beside the few steps of the check
    assert set(held[-60:]) == {77}


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_whole_model_is_measured(implementation: str) -> None:
    spec = _spec(workload="model", preset="tiny", shape=None, nsa=None, layers=None, implementations=[implementation])
    point = spec.points(CPU)[0]
    assert point.axes.layers == 2
    assert _values(_measure(point))["time"] > 0


def test_the_key_ignores_what_dense_attention_does_not_use() -> None:
    def key(window: int, implementation: str) -> str:
        implementations = list(dict.fromkeys([implementation, "chunked"]))
        spec = _spec(nsa=NSA | {"window": window}, implementations=implementations)
        return spec.points(CPU)[0].key("code", CPU)

    assert key(16, "dense") == key(32, "dense")
    assert key(16, "chunked") != key(32, "chunked")


def test_bytes_are_those_of_the_tokens_read() -> None:
    """Counted by hand for the shape of the acceptance test: 64K tokens, 8 sequences, 12 layers, bf16."""
    model, rows = PRESETS["m7c_125m"], 8 * 12 * 2
    dense = bytes_read(model.__class__(**{**vars(model), "attention": "dense"}), 8, 65_536, 2)
    assert dense == rows * 65_536 * 256
    seen, scores = (65_536 - 32) // 16 + 1, 4 * 6 * ((65_536 - 32) // 16 + 1)
    sparse = bytes_read(model, 8, 65_536, 2)
    assert sparse == rows * ((seen + 16 * 64 + 512 + 2) * 256 + scores)
    assert dense / sparse > 10


def test_the_own_block_counts_up_to_the_token_and_a_short_context_fully() -> None:
    model = _spec(layers=1, batch=1).model
    row = 2 * 8 * 4 * 2  # key and value, float32, two kv heads

    def tokens(length: int) -> float:
        seen = NSAConfig(**NSA).cmp_tokens(length)
        return (bytes_read(model, 1, length, 4) - 2 * 4 * 2 * seen) / row - seen - 8 / 4

    assert tokens(5) == 5 + 5
    assert tokens(33) == 3 * 8 + 1 + 16
    assert tokens(40) == 4 * 8 + 16


def test_points_that_do_not_fit_are_skipped() -> None:
    spec = _spec(lengths=[64, 2**24], memory_gib=1, implementations=["dense"])
    short, long = spec.points(CPU)
    assert short.skip_reason is None
    assert "memory_gib allows 1 GiB; shorten lengths" in str(long.skip_reason)
    assert held_bytes(spec.model, 2, 64, 4) == 2 * 2 * 3 * 2 * 8 * 4 * (64 + spec.model.nsa.cmp_tokens(64))


@pytest.mark.parametrize("implementation", ["chunked", "dense"])
def test_a_wrong_step_is_never_timed(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(case: Any, token: dict[str, torch.Tensor], cache: Any) -> torch.Tensor:
        return right(case, token | {"v": token["v"] * 0.9}, cache)

    right = decode._step
    monkeypatch.setattr(decode, "_step", forgetful)
    phases: list[str] = []
    point = _spec(implementations=[implementation]).points(CPU)[0]
    with pytest.raises(WrongResult, match=rf"{implementation}: output is off by"):
        measure(point.case, lambda phase, done=0, total=0: phases.append(phase))
    assert phases == ["check"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"implementations": ["flash9"]}, "'flash9' is no implementation; use .*chunked.*dense"),
        ({"implementations": []}, "at least 1"),
        ({"shape": None}, "preset: missing; use one of tiny, m7c_125m"),
        ({"preset": "tiny"}, "shape is given as well; keep one"),
        ({"workload": "model"}, "preset: missing"),
        ({"shape": {"query_heads": 4, "kv_heads": 2, "head_dim": 7}}, "head_dim: 7: use an even number"),
        ({"nsa": NSA | {"compress": "mlp"}}, "compress: 'mlp': is learned by a layer"),
        ({"layers": 0}, "greater than or equal to 1"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        _spec(**changes)
