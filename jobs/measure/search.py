"""Searches of which each size is a point: the longest that fits, and the smallest model whose pass fails.

A larger model, or a longer sequence, is taken to fail where a smaller one does; the answer does not rest on it: its
neighbours are shown to pass.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from jobs.schema.point import EndedPoint, Metric
from jobs.schema.quantities import Better, Quantity, Role
from jobs.schema.states import PointState

SIZES_TRIED = Quantity("sizes_tried", "1", "Sizes that were tried")
SIZES_FAILED = Quantity("sizes_failed", "1", "Sizes that failed", "failed", Better.LOWER, Role.HEADLINE)
FAILING_LAYERS = Quantity("failing_layers", "1", "Layers of the smallest size that fails", role=Role.HEADLINE)
FAILING_LENGTH = Quantity("failing_length", "token", "Length of the smallest size that fails", role=Role.HEADLINE)
BISECTION = (FAILING_LAYERS, FAILING_LENGTH, SIZES_FAILED, SIZES_TRIED)
Size = tuple[int, int]  # layers, and tokens of a sequence
S = TypeVar("S")


class Untried(Exception):  # noqa: N818 - control flow of a search
    """The search asks for a size, its only argument, that no point has tried yet."""


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
    named = {each: f"{each[0]} layer{'s' if each[0] > 1 else ''}, S={each[1]}" for each in tried}
    passing, words = [], []
    if place[0]:
        passing.append(named[layers[place[0] - 1], length])
    else:
        words.append("fewer layers are not among the sizes")
    if place[1]:
        passing.append(named[layer, lengths[place[1] - 1]])
    else:
        words.append("shorter lengths are not among the sizes")
    if passing:
        words.insert(0, f"{' and '.join(passing)} pass{'' if passing[1:] else 'es'}")
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
    while True:  # each bisection ends at a place that fails and whose lower neighbour passes
        length = bisect_left(range(length), True, key=partial(fails, layer))
        layer = bisect_left(range(layer), True, key=lambda place, length=length: fails(place, length))
        if length == 0 or not fails(layer, length - 1):
            return layer, length
        length -= 1
