"""The search for the smallest size that fails, each size of which is a point."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from supervised import searched, values
from travelling import CPU, travelled

from jobs import backward
from jobs.measure.search import smallest_failing
from jobs.schema.point import Point
from jobs.schema.states import FAILED, PointState


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


def _spec(**changes: Any) -> backward.Spec:
    case = {"preset": "tiny", "layers": [4, 1, 2], "lengths": [64, 128]}
    data = {"kind": "backward", "name": "t", "implementations": ["chunked"], "cases": [case], "bisect": {"size_s": 200}}
    return backward.Spec.model_validate(data | changes)


def _fails_from(layers: int, length: int) -> Any:
    def outcome(point: Point) -> Any:
        fails = point.axes.layers >= layers and point.axes.seq_len >= length
        return PointState.CRASH if fails else PointState.OK, {}

    return outcome


def test_a_search_names_the_smallest_size_that_fails() -> None:
    tried, (point,) = searched(_spec(), CPU, _fails_from(2, 128))
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


def test_a_lost_size_leaves_the_search_open() -> None:
    tried, conclusions = searched(_spec(), CPU, lambda point: (PointState.LOST, {}))
    assert (len(tried), conclusions) == (1, [])


def test_each_variant_has_a_search_of_its_own() -> None:
    case = {"preset": "tiny", "layers": [1, 2], "lengths": [64], "branches": ["all", "win"], "repeats": [1, 3]}
    _, conclusions = searched(_spec(cases=[case], implementations=["chunked", "naive"]), CPU, _fails_from(2, 1))
    assert len({each.label for each in conclusions}) == 8
    assert all(values(each)["failing_layers"] == 2 for each in conclusions)


def test_a_size_is_watched_and_not_timed() -> None:
    (point,) = _spec().points(CPU)
    case = travelled(point)
    result = backward.measure(case.model_copy(update={"model": replace(case.model, layers=1)}), lambda *_: None)
    assert {metric.name for metric in result.metrics} == {"oracle_error", "oracle_error_bound"}
    assert "layers.json" in result.files
