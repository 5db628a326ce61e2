"""The searches, each size of which is a point: capacity's over lengths, backward's for what fails; and estimates."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised import Ended, searched, supervised, values
from travelling import CPU, travelled, values_of

from jobs import backward, capacity, estimate
from jobs.estimate import measure_parts
from jobs.measure.passes import ModelPass
from jobs.measure.search import smallest_failing
from jobs.schema.point import Point
from jobs.schema.states import FAILED, PointState
from orchestrator.execute.supervisor import Conditions

PLAN = {"steps": 1000, "tokens_per_step": 3600, "hours": 1.0}  # needs 1,000 tok/s


def _spec(**changes: Any) -> capacity.Spec:
    data: dict[str, Any] = {"kind": "capacity", "name": "t", "preset": "tiny", "implementations": ["dense"]}
    return capacity.Spec.model_validate(data | {"lengths": [32, 64, 128], "checkpointing": [False]} | changes)


def _until(longest: int, rates: dict[int, float] | None = None) -> Any:
    def outcome(point: Point) -> Any:
        length = point.case.seq_len
        if length > longest:
            return PointState.OOM, {}
        return PointState.OK, {"throughput": (rates or {}).get(length, 5000.0), "peak_memory": 7.0}

    return outcome


def test_without_a_prediction_the_search_goes_upwards() -> None:
    unpredicted = _spec(implementations=["gather"], lengths=[32, 64, 128])
    for longest, lengths in ((64, [32, 64, 128]), (16, [32])):
        tried, (conclusion,) = searched(unpredicted, CPU, _until(longest))
        assert [point.axes.seq_len for point in tried] == lengths
        assert values(conclusion).get("longest") == (longest if longest in lengths else None)


def test_the_next_longer_one_is_shown_to_fail() -> None:
    tried, (conclusion,) = searched(_spec(), CPU, _until(64))
    assert [point.axes.seq_len for point in tried] == [128, 64]  # 128 is predicted to fit
    assert all(point.answers == {PointState.OOM} for point in tried)
    assert (conclusion.label, conclusion.axes.seq_len) == ("dense batch 1, checkpointing off", None)
    found = values(conclusion)
    assert (found["longest"], found["longest_predicted"], found["shortest_failed"]) == (64, 128, 128)
    assert (found["throughput"], found["peak_memory"]) == (5000, 7)


def test_a_length_is_measured_within_an_enforced_limit(tmp_path: Path) -> None:
    """Measured in a child with 256 MiB: the masks of 2,048 tokens do not fit, those of 64 do, as predicted."""
    spec = _spec(implementations=["naive"], lengths=[64, 2048], memory_gib=0.25)
    conditions = Conditions("cpu", spec.deadlines, memory_bytes=2**28)  # as of the spec's run

    def outcome(point: Point) -> Any:
        (ended,) = [u for u in supervised([point], conditions, tmp_path) if isinstance(u, Ended)]
        return ended.outcome.state, {metric.name: metric.value for metric in ended.outcome.metrics}

    tried, (conclusion,) = searched(spec, CPU, outcome)
    assert [point.axes.seq_len for point in tried] == [64, 2048]
    found = values(conclusion)
    assert (found["longest"], found["longest_predicted"], found["shortest_failed"]) == (64, 64, 2048)
    assert 0 < found["peak_memory"] < 256
    assert found["throughput"] > 0


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({32: 3000, 64: 2000, 128: 1000}, 128),  # all fit and are fast enough
        ({32: 3000, 64: 2000, 128: 999}, 64),
        ({32: 3000, 64: 999}, 32),  # 128 does not fit
        ({32: 998, 64: 999, 128: 997}, None),
    ],
)
def test_a_length_too_slow_for_the_plan_does_not_count(rates: dict[int, float], expected: int | None) -> None:
    _, (point,) = searched(_spec(plan=PLAN), CPU, _until(max(rates), rates))
    found = values(point)
    assert (found["longest"], found["throughput_needed"]) == (max(rates), pytest.approx(1000))
    assert found.get("longest_in_plan") == expected
    slow = "plan: no length that fits trains at the 1,000 tok/s that it needs; the fastest, S=64, at 999"
    assert point.conclusion is not None
    assert point.conclusion.warning == (None if expected else slow)


def test_a_limit_below_the_weights_alone_skips_the_point_with_the_arithmetic() -> None:
    dense, unpredicted = _spec(implementations=["dense", "gather"], lengths=[32], memory_gib=1e-6).points(CPU)
    assert re.fullmatch(r"needs 1\.\d+ MiB, memory_gib allows 1\.048 KiB; raise the limit, .*", str(dense.skip_reason))
    assert unpredicted.skip_reason is None


@pytest.mark.parametrize("frontier", list(itertools.product(range(4), range(5))))
def test_the_search_ends_where_both_neighbours_pass(frontier: tuple[int, int]) -> None:
    """With one corner from which on sizes fail, and with two; asked no more often than predicted where there is one."""
    for corners in ([frontier], [frontier, (3 - frontier[0], 4 - frontier[1])]):
        asked: set[tuple[int, int]] = set()

        def fails(layer: int, length: int, asked: Any = asked, corners: Any = corners) -> bool:
            asked.add((layer, length))
            return any(a <= layer and b <= length for a, b in corners)

        found = smallest_failing(fails, 4, 5)
        assert found in corners
        assert asked >= {(x, y) for x, y in [(found[0] - 1, found[1]), (found[0], found[1] - 1)] if min(x, y) >= 0}
        assert len(corners) > 1 or len(asked) <= 2 + 2 + 3  # the largest, a neighbour, and the halvings of 4 and 5


def _bisection(**changes: Any) -> backward.Spec:
    case = {"preset": "tiny", "layers": [4, 1, 2], "lengths": [64, 128]}
    data = {"kind": "backward", "name": "t", "implementations": ["chunked"], "cases": [case], "bisect": {"size_s": 200}}
    return backward.Spec.model_validate(data | changes)


def _fails_from(layers: int, length: int) -> Any:
    def outcome(point: Point) -> Any:
        fails = point.axes.layers >= layers and point.axes.seq_len >= length
        return PointState.CRASH if fails else PointState.OK, {}

    return outcome


def test_a_search_names_the_smallest_size_that_fails() -> None:
    tried, (point,) = searched(_bisection(), CPU, _fails_from(2, 128))
    sizes = {(each.axes.layers, each.axes.seq_len) for each in tried}
    assert sizes == {(4, 128), (4, 64), (2, 128), (1, 128), (2, 64)}
    assert all(each.answers == FAILED - {PointState.LOST} for each in tried)
    assert values(point) == {"failing_layers": 2, "failing_length": 128, "sizes_tried": 5, "sizes_failed": 2}
    assert point.label == "chunked all tiny smallest failing size"
    assert (point.axes.layers, point.axes.seq_len) == (None, None)
    assert point.conclusion is not None
    assert point.conclusion.warning == (
        "the smallest size that fails: 2 layers, S=128 (crash: as the test says); "
        "1 layer, S=128 and 2 layers, S=64 pass"
    )


def test_what_is_no_answer_ends_a_search_without_a_conclusion() -> None:
    """Capacity's is a size that neither fits nor runs out of memory; a bisection's is a lost one."""
    for spec, state in ((_spec(), PointState.HANG), (_bisection(), PointState.LOST)):
        tried, conclusions = searched(spec, CPU, lambda point, state=state: (state, {}))
        assert (len(tried), conclusions) == (1, [])


def test_each_variant_has_a_search_of_its_own() -> None:
    case = {"preset": "tiny", "layers": [1, 2], "lengths": [64], "branches": ["all", "win"], "repeats": [1, 3]}
    _, conclusions = searched(_bisection(cases=[case], implementations=["chunked", "naive"]), CPU, _fails_from(2, 1))
    assert len({each.label for each in conclusions}) == 8
    assert all(values(each)["failing_layers"] == 2 for each in conclusions)


def test_a_size_is_watched_and_not_timed() -> None:
    (point,) = _bisection().points(CPU)
    case = travelled(point)
    result = backward.measure(case.model_copy(update={"model": replace(case.model, layers=1)}), lambda *_: None)
    assert {metric.name for metric in result.metrics} == {"oracle_error", "oracle_error_bound"}
    assert "layers.json" in result.files


MIB = 2**20


def _estimate(**changes: Any) -> estimate.Spec:
    data: dict[str, Any] = {"kind": "estimate", "name": "t", "preset": "tiny", "implementations": ["chunked"]}
    return estimate.Spec.model_validate(data | {"lengths": [64]} | changes)


def test_parts_of_a_known_pass() -> None:
    """One product y = x w, x [256,1024], w [1024,512], float32: the gradient is w's, the output is an activation."""
    x, w, cpu = torch.ones(256, 1024), torch.ones(1024, 512, requires_grad=True), torch.device("cpu")
    parts = measure_parts(lambda: x @ w, lambda y: y.backward(torch.ones(256, 512)), [w], cpu)
    assert parts["gradients"] == 2 * MIB
    assert parts["activations"] == pytest.approx(MIB / 2, abs=1024)
    assert parts["workspace"] == pytest.approx(MIB / 2, abs=1024)  # the output's gradient


@pytest.mark.parametrize(
    ("implementation", "changes"),
    [
        ("chunked", {"passes": ["train"]}),
        ("dense", {"passes": ["train"]}),
        ("naive", {"passes": ["forward+backward"], "checkpointing": True}),
    ],
)
def test_predicted_and_allocated_parts_agree(implementation: str, changes: dict[str, Any]) -> None:
    (point,) = _estimate(implementations=[implementation], lengths=[512], **changes).points(CPU)
    result = estimate.measure(travelled(point), lambda *_: None)
    found = values_of(result)
    assert abs(found["estimate_error"]) < 10
    for part in ("parameters", "optimizer", "inputs"):
        assert found[f"predicted_{part}"] == pytest.approx(found[f"allocated_{part}"], rel=0.01)
    extra = sum(found[f"allocated_{part}"] for part in ("gradients", "activations", "workspace"))
    assert extra == pytest.approx(found["peak_extra_memory"], rel=0.02)  # two ways of measuring one peak
    assert found["predicted_activations"] == pytest.approx(found["allocated_activations"], rel=0.1, abs=1e-3)
    assert found["predicted_workspace"] == pytest.approx(found["allocated_workspace"], rel=0.15)


def test_the_optimizers_state_counts_on_a_device_without_an_index() -> None:
    """As on a GPU, a tensor's device is not equal to the one that it was put on: "cpu:0" gives "cpu"."""
    (point,) = _estimate(passes=["train"]).points(CPU)
    trial = ModelPass(point.case.model_copy(update={"device": "cpu:0"}))
    trial.run()
    moments = sum(x.numel() for x in trial.state if x.dim())
    assert moments == 2 * sum(p.numel() for p in trial.parameters)
