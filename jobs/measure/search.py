"""Searches of which each size is a point: the longest that fits, and the smallest model whose pass fails.

A larger model, or a longer sequence, is taken to fail where a smaller one does; the answer does not rest on it: its
neighbours are shown to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jobs.schema.point import EndedPoint, Metric
from jobs.schema.quantities import Better, Quantity, Role
from jobs.schema.states import PointState

SIZES_TRIED = Quantity("sizes_tried", "1", "Sizes that were tried")
SIZES_FAILED = Quantity("sizes_failed", "1", "Sizes that failed", "failed", Better.LOWER, Role.HEADLINE)
FAILING_LAYERS = Quantity("failing_layers", "1", "Layers of the smallest size that fails", role=Role.HEADLINE)
FAILING_LENGTH = Quantity("failing_length", "token", "Length of the smallest size that fails", role=Role.HEADLINE)
BISECTION = (FAILING_LAYERS, FAILING_LENGTH, SIZES_FAILED, SIZES_TRIED)

Size = tuple[int, int]
"""Layers, and tokens of a sequence."""
S = TypeVar("S")


class Untried(Exception):  # noqa: N818 - control flow of a search
    """The search asks for a size that no point has tried yet."""

    def __init__(self, size: Any) -> None:
        super().__init__(size)
        self.size = size


def outcome(tried: Mapping[S, EndedPoint], size: S) -> EndedPoint:
    """The point that tried a size. Raises Untried."""
    if size not in tried:
        raise Untried(size)
    return tried[size]


def bisected(
    layers: Sequence[int], lengths: Sequence[int], tried: Mapping[Size, EndedPoint]
) -> tuple[tuple[Metric, ...], str | None]:
    """Metrics of a search for the smallest size that fails, and the answer in words; None if not even the largest does.

    Raises Untried for the next size to try.
    """
    layers, lengths = sorted(layers), sorted(lengths)

    def fails(layer: int, length: int) -> bool:
        return outcome(tried, (layers[layer], lengths[length])).state is not PointState.OK

    place = smallest_failing(fails, len(layers), len(lengths))
    failed = sum(trial.state is not PointState.OK for trial in tried.values())
    counts = Metric.of(SIZES_FAILED, failed), Metric.of(SIZES_TRIED, len(tried))
    if place is None:
        return counts, None
    layer, length = size = layers[place[0]], lengths[place[1]]
    fewer = [other for other in tried if other[0] < layer and other[1] == length]
    shorter = [other for other in tried if other[0] == layer and other[1] < length]
    named = {each: f"{each[0]} layer{'s' if each[0] > 1 else ''}, S={each[1]}" for each in tried}
    passing = [named[max(sizes)] for sizes in (fewer, shorter) if sizes]
    words = [f"{' and '.join(passing)} pass{'' if passing[1:] else 'es'}"] if passing else []
    words += [] if fewer else ["fewer layers are not among the sizes"]
    words += [] if shorter else ["shorter lengths are not among the sizes"]
    neighbours, trial = ", ".join(words), tried[size]
    method = f"bisection, each size a point; {neighbours}"
    found = Metric.of(FAILING_LAYERS, layer, method=method), Metric.of(FAILING_LENGTH, length, method=method)
    what = f"the smallest size that fails: {named[size]} ({trial.state}: {trial.reason}); {neighbours}"
    return (*counts, *found), what


def smallest_failing(fails: Callable[[int, int], bool], layers: int, lengths: int) -> tuple[int, int] | None:
    """Places (of the number of layers, of the length) that fail while both lower neighbours pass; None if the last
    of so many layers and lengths pass."""
    layer, length = layers - 1, lengths - 1
    if not fails(layer, length):
        return None
    while True:
        length = _first(lambda place, layer=layer: fails(layer, place), length)
        layer = _first(lambda place, length=length: fails(place, length), layer)
        if length == 0 or not fails(layer, length - 1):
            return layer, length
        length -= 1


def _first(fails: Callable[[int], bool], last: int) -> int:
    """A place that fails and whose lower neighbour passes, between 0 and `last`, which fails."""
    passes = -1
    while last - passes > 1:
        middle = (passes + last) // 2
        if fails(middle):
            last = middle
        else:
            passes = middle
    return last
