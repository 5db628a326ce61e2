"""Change points: where the level of a series of runs changed, in a step or creeping.

E-divisive (Matteson and James 2014, arXiv:1306.4933) proposes them; Student's t-test decides, as in Hunter (Fleming et
al. 2023, doi:10.1145/3578244.3583719), for it needs fewer runs than permutations do. apache-otava is Hunter as a
package, but pins NumPy and brings clients of BigQuery, Postgres and Slack.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

SURE = 0.0002  # p of the t-test: in one of 200 series of 50 values without a change one is found
_FEWEST = 2  # values on each side: a single one may be an outlier
_SHORTEST_LINE = 5  # values
_BLOCK = 32  # places judged at once, of which all statistics are in a processor's cache
_WEAK = 10  # times as much is enough for a place to be kept until its neighbours are settled, as in Hunter


@dataclass(frozen=True)
class Shift:
    """A change of the level: a step if the two places are next to each other, else it crept."""

    last: int  # the place of the last value before it
    first: int  # the place of the first value after it
    size: float  # the level after it less the level before it

    @property
    def creeping(self) -> bool:
        return self.first - self.last > 1


def shifts(values: Values, least: float = 0.0, sure: float = SURE) -> list[Shift]:
    """The changes of a series by more than `least`, in order."""
    places = change_points(values, least, sure)
    bounds = [0, *places, len(values)]
    levels = [float(np.median(part)) for part in np.split(values, places)]
    ups = [after > before for before, after in pairwise(levels)]
    ends = [number for number, (up, following) in enumerate(pairwise([*ups, None])) if up != following]
    crept: list[tuple[int, int]] = []
    for begin, end in pairwise([-1, *ends]):  # changes in one direction: steps, or a line of which steps were made
        low, high = bounds[begin + 1], bounds[end + 2]
        if _is_line(values[low:high], [place - low for place in places[begin + 1 : end + 1]]):
            crept.append((low, high))
    free = [place for place in places if not any(low < place < high for low, high in crept)]
    for low, high in pairwise(bounds):
        if not any(begin <= low and high <= end for begin, end in crept) and _is_line(values[low:high], []):
            crept.append((low, high))
    found = [Shift(place - 1, place, levels[places.index(place) + 1] - levels[places.index(place)]) for place in free]
    slopes = [float(np.polyfit(range(high - low), values[low:high], 1)[0]) for low, high in crept]
    sizes = [slope * (high - low - 1) for slope, (low, high) in zip(slopes, crept, strict=True)]
    found += [Shift(low, high - 1, size) for size, (low, high) in zip(sizes, crept, strict=True) if abs(size) > least]
    return sorted(found, key=lambda shift: shift.last)


def change_points(values: Values, least: float = 0.0, sure: float = SURE) -> list[int]:
    """The places of the first values after each change of the mean by more than `least`, in order."""
    places = _split(values, 0, _WEAK * sure)
    while places:  # the weakest goes first, as its neighbours are then judged by more values
        parts = np.split(values, places)
        judged = [(_p(a, b), -abs(b.mean() - a.mean())) for a, b in pairwise(parts)]
        weakest = max(range(len(places)), key=lambda place: judged[place])
        if judged[weakest][0] <= sure:
            weakest = max(range(len(places)), key=lambda place: judged[place][1])
            if -judged[weakest][1] > least:
                break
        del places[weakest]
    return places


def _split(values: Values, offset: int, sure: float) -> list[int]:
    if len(values) < 2 * _FEWEST:
        return []
    place, end = most_likely(values)
    if _p(values[:place], values[place:end]) > sure:
        return []
    left, right = _split(values[:place], offset, sure), _split(values[place:], offset + place, sure)
    return [*left, offset + place, *right]


def most_likely(values: Values) -> tuple[int, int]:
    """The place at which the values before and after differ most in distribution, by E-divisive's statistic, and the
    end of those after it: not that of all, where a change was taken back."""
    distances = np.abs(np.subtract.outer(values, values))
    sums = np.pad(distances.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    within = sums.diagonal()  # of all values before a place
    best, found = -np.inf, (_FEWEST, len(values))
    for first in range(_FEWEST, len(values) - _FEWEST + 1, _BLOCK):
        place = np.arange(first, min(first + _BLOCK, len(values) - _FEWEST + 1))[:, None]
        end = np.arange(first + _FEWEST, len(values) + 1)
        left, right = place, np.maximum(end - place, _FEWEST)
        inside, total, across = within[place], within[end], sums[first : first + len(place), first + _FEWEST :]
        energy = 2 * (across - inside) / (left * right)
        energy -= inside / (left * (left - 1)) + (total - 2 * across + inside) / (right * (right - 1))
        statistic = np.where(end - place >= _FEWEST, left * right / (left + right) * energy, -np.inf)
        row, column = np.unravel_index(int(np.argmax(statistic)), statistic.shape)
        if statistic[row, column] > best:
            best, found = statistic[row, column], (int(place[row, 0]), int(end[column]))
    return found


def _p(left: Values, right: Values) -> float:
    """p of Student's t-test of two parts of a series."""
    from scipy.stats import ttest_ind_from_stats  # takes long to import

    number = len(left) + len(right)
    spread = math.sqrt((len(left) * left.var() + len(right) * right.var()) / (number - 2))
    if spread == 0:
        return float(left.mean() == right.mean())
    t = ttest_ind_from_stats(left.mean(), spread, len(left), right.mean(), spread, len(right))
    return float(t.pvalue)


def _is_line(values: Values, places: list[int]) -> bool:
    """Whether a line describes values better than levels that change at places (Schwarz 1978), and is not level."""
    from scipy.stats import linregress

    number, x = len(values), np.arange(len(values))
    if number < _SHORTEST_LINE or np.ptp(values) == 0:
        return False
    fit: Any = linregress(x, values)
    line = values - fit.slope * x
    steps = np.concatenate([part - part.mean() for part in np.split(values, places)])
    scores = [
        number * math.log(max(rest.var(), 1e-300)) + parameters * math.log(number)
        for rest, parameters in ((line, 2), (steps, 2 * len(places) + 1))
    ]
    return bool(fit.pvalue <= SURE and scores[0] < scores[1])
