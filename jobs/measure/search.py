"""Searches of which each size is a point: the longest that fits, and the smallest model whose pass fails.

A larger model, or a longer sequence, is taken to fail where a smaller one does; the answer does not rest on it: its
neighbours are shown to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


class Untried(Exception):  # noqa: N818 - control flow of a search
    """The search asks for a size that no point has tried yet."""

    def __init__(self, size: Any) -> None:
        super().__init__(size)
        self.size = size


def last_that_fits(fits: Callable[[int], bool], count: int, guess: int) -> int | None:
    """Last of `count` places that fits, from a guess upwards or downwards; None if none does.

    What fits at a place is taken to fit at those before it. Each place is tried once.
    """
    if fits(guess):
        while guess + 1 < count and fits(guess + 1):
            guess += 1
        return guess
    return next((place for place in range(guess - 1, -1, -1) if fits(place)), None)


@dataclass(frozen=True)
class Bisection:
    """Outcome of the search.

    Attributes:
        smallest: the smallest size that fails; None: not even the largest does.
        tried: every size that was tried.
    """

    smallest: Size | None
    tried: Mapping[Size, EndedPoint]

    @classmethod
    def of(cls, layers: Sequence[int], lengths: Sequence[int], tried: Mapping[Size, EndedPoint]) -> Bisection:
        """The answer by the sizes that were tried. Raises Untried for the next one to try."""
        layers, lengths = sorted(layers), sorted(lengths)

        def fails(layer: int, length: int) -> bool:
            size = layers[layer], lengths[length]
            if size not in tried:
                raise Untried(size)
            return tried[size].state is not PointState.OK

        place = smallest_failing(fails, len(layers), len(lengths))
        return cls(None if place is None else (layers[place[0]], lengths[place[1]]), tried)

    @property
    def largest(self) -> Size:
        return max(self.tried)

    @property
    def sentence(self) -> str:
        """The smallest size that fails, and its neighbours."""
        assert self.smallest is not None, "of a search that found one"
        trial = self.tried[self.smallest]
        return (
            f"the smallest size that fails: {_words(self.smallest)} ({trial.state}: {trial.reason}); {self._neighbours}"
        )

    @property
    def _neighbours(self) -> str:
        """Outcomes of the next smaller sizes, in words; none is below a search's fewest layers and shortest length."""
        assert self.smallest is not None, "of a search that found one"
        layers, length = self.smallest
        fewer = [size for size in self.tried if size[0] < layers and size[1] == length]
        shorter = [size for size in self.tried if size[0] == layers and size[1] < length]
        found = [_words(max(sizes)) for sizes in (fewer, shorter) if sizes]
        ends = [
            *([f"{' and '.join(found)} pass{'' if found[1:] else 'es'}"] if found else []),
            *([] if fewer else ["fewer layers are not among the sizes"]),
            *([] if shorter else ["shorter lengths are not among the sizes"]),
        ]
        return ", ".join(ends)

    def metrics(self) -> list[Metric]:
        failed = sum(trial.state is not PointState.OK for trial in self.tried.values())
        found = [Metric.of(SIZES_FAILED, failed), Metric.of(SIZES_TRIED, len(self.tried))]
        if self.smallest is not None:
            method = f"bisection, each size a point; {self._neighbours}"
            layers, length = self.smallest
            found += [Metric.of(FAILING_LAYERS, layers, method=method)]
            found += [Metric.of(FAILING_LENGTH, length, method=method)]
        return found


def smallest_failing(fails: Callable[[int, int], bool], layers: int, lengths: int) -> tuple[int, int] | None:
    """Places (of the number of layers, of the length) that fail while both lower neighbours pass.

    Args:
        fails: whether the size at these places fails.
        layers, lengths: numbers of places.

    Returns:
        None if the last places pass.
    """
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


def _words(size: Size) -> str:
    return f"{size[0]} layer{'s' if size[0] > 1 else ''}, S={size[1]}"
