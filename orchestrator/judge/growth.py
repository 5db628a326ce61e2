"""Laws of growth with the sequence length, fitted to one series of values.

The plain law is value = c · S^p, a line on log-log axes. At short lengths, however, launches cost more than the work:
value = overhead + c · S^p sees through a constant part, and lengths below which neither law holds are left out. The
exponent is quoted with the lengths that it rests on. Attention's true growth is a sum of parts, overhead + linear +
quadratic, which looks like a power law on few lengths and is none: where that sum describes the values better, it is
given in the exponent's place.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MIN_LENGTHS = 3
_MIN_RANGE = 4  # lengths that a law keeps if shorter ones are left out: three fit almost any line
HOLDS = 0.05  # relative residual up to which a law describes its values
_EXACT = 0.002  # up to here it is exact, as of memory: preferred to a longer range on which it only holds
_NOISE = 0.01  # relative noise from which on a value's spread lowers its weight
_VAGUE = 1e3  # relative spread from which on a value weighs nothing; squares of larger ones overflow
_LEAST_NOISE = 0.001  # relative noise that any series has at least: residuals of three values may vanish by chance
_IMMENSE = 1e100
_LEVEL = 0.97  # of the F test; choosing law and range by the data costs two of these hundred, measured in the tests
_EVIDENCE = 2.0  # by which the information criterion must favour an overhead (Burnham and Anderson, 2002, section 2.6)
_SUSPECT = 0.8  # of the F test from which on a plain law's interval reckons with an overhead; measured in the tests
_EXPONENTS = np.linspace(-1, 4, 2001)
NORMAL_INTERVAL = 1.959963984540054  # standard errors to the end of a 95 % interval: the normal quantile of 0.975
_OCTAVE = math.log2(1.9)  # from here on two lengths are an octave apart; half octaves are rounded to multiples of 128
_MIX_RANGE = 6  # lengths that a mix keeps if a shorter one that it misses is left out
_OUTLIES = 0.6  # of the residual, if less is left without its shortest length: that has another law, as of a launch
_COUNTS = 0.1  # share of the value from which on a part counts
_FEW_OCTAVES = 3  # beyond, a slope spans more than one
_SURE = 0.25  # half of a local slope's interval up to which it stands alone


@dataclass(frozen=True)
class Mix:
    """value = overhead + linear · S + quadratic · S², none of them negative: what contains attention's true growth."""

    parts: tuple[float, float, float]  # at the longest length, in the values' unit
    share_low: float  # 95 % interval of the quadratic part's share there
    share_high: float
    takes_over: float  # length from which on the quadratic part is the greater half; infinite where there is none
    residual: float  # root mean square of the relative residuals
    lengths: tuple[int, ...]  # the distinct lengths fitted, ascending

    def at(self, seq_len: float) -> float:
        """Fitted value at a length."""
        return float(np.polyval(self.parts[::-1], seq_len / self.lengths[-1]))

    @property
    def share(self) -> float:
        """The quadratic part's share at the longest length."""
        return self.parts[2] / sum(self.parts)

    def __str__(self) -> str:
        """The shares at the longest length, and where the quadratic part takes over."""
        named = zip(self.parts, ("overhead", "linear", "quadratic"), strict=True)
        shares = ", ".join(f"{part / sum(self.parts):.0%} {name}" for part, name in named if part > 0)
        interval = f"({self.share_low:.0%} to {self.share_high:.0%})"
        after = f"; mostly quadratic from {short(int(self.takes_over))}" if math.isfinite(self.takes_over) else ""
        return f"{shares} {interval} at {short(self.lengths[-1])}{after}"


@dataclass(frozen=True)
class Growth:
    """value = overhead + 10**coefficient · S**exponent, over the lengths from which on it holds."""

    exponent: float  # of the growth over these lengths: 1 is linear, 2 quadratic
    ci_low: float  # its 95 % interval, within -1 to 4
    ci_high: float
    coefficient: float  # log10 of the growing part at S = 1
    n: int  # points fitted
    lengths: tuple[int, ...]  # the distinct lengths fitted, ascending; shorter ones of the series may be left out
    overhead: float  # in the values' unit; 0 where the plain law explains the values as well
    residual: float  # root mean square of the relative residuals
    mix: Mix | None = None  # the growth as a sum of parts; None with fewer than four lengths, or where it does not hold
    refused: bool = False  # whether the mix describes the values better than any power law, so there is no exponent

    def at(self, seq_len: float) -> float:
        """Fitted value at a length."""
        if self.refused and self.mix is not None:
            return self.mix.at(seq_len)
        return self.overhead + 10 ** (self.coefficient + self.exponent * math.log10(seq_len))

    def __str__(self) -> str:
        """The exponent with its interval; the mix where a power law is refused."""
        return str(self.mix) if self.refused else f"S^{self.exponent:.2f} ({self.ci_low:.2f} to {self.ci_high:.2f})"


def fit_growth(
    lengths: Sequence[float], values: Sequence[float], spreads: Sequence[float] | None = None
) -> Growth | None:
    """Fit the law of growth on the longest range, up to the longest length, on which one holds (an exact one first).

    Both laws are fitted by least squares of the relative residuals, weighted by the values' spread; the law is chosen
    by Akaike's information criterion with its correction for few points (Hurvich and Tsai, 1989). The interval is the
    profile of the sum of squares (Bates and Watts, Nonlinear Regression Analysis, 1988, section 6.1). A range of five
    lengths or more on which a law is exact precedes a longer one. Where none of four or more fits, the last four stay,
    with the wide interval that they give. A plain law's interval reaches over that of the law with an overhead where
    few points leave the choice open.

    Args:
        spreads: relative standard error of each value; None: alike.

    Returns:
        None with fewer than three distinct lengths, or with values that no unit has, whose squares no float holds.

    Raises:
        ValueError: the numbers of lengths and values differ, or one of them is not positive and finite (a failure is a
            state, not a zero).
    """
    x, y, noise = _checked(lengths, values, spreads, _NOISE)
    distinct = _distinct(x)
    if len(distinct) < MIN_LENGTHS or y.min() < 1 / _IMMENSE or y.max() > _IMMENSE:
        return None
    starts = distinct[: max(0, len(distinct) - _MIN_RANGE) + 1]
    laws = []
    for kept in (x >= first for first in starts):
        law, criterion = _law(x[kept], y[kept], noise[kept], with_overhead=False)
        if len(law.lengths) > _MIN_RANGE:  # an overhead needs more points than parameters
            other, others = _law(x[kept], y[kept], noise[kept], with_overhead=True)
            law = other if others < criterion - _EVIDENCE and other.overhead > 0 else law
        laws.append(law)
    exact = [law for law in laws if law.residual <= _EXACT and len(law.lengths) > _MIN_RANGE]
    law = next(iter(exact), None) or next((law for law in laws if law.residual <= HOLDS), laws[-1])
    if not law.overhead and law not in exact:
        law = _widened(law, x, y, noise)
    kept, mix = x > 0, None
    for longer in (x >= first for first in starts[:-1]):
        if (tried := _mix(x[longer], y[longer], noise[longer])) is None or tried.residual > HOLDS:
            continue
        if mix is not None and (len(tried.lengths) < _MIX_RANGE or tried.residual > _OUTLIES * mix.residual):
            break
        kept, mix = longer, tried
    if mix is None or not _refuses(mix, x[kept], y[kept], noise[kept]):
        return replace(law, mix=mix)
    own = {"lengths": mix.lengths, "n": int(kept.sum()), "overhead": mix.parts[0], "residual": mix.residual}
    return replace(law, mix=mix, refused=True, **own)


def _mix(x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> Mix | None:
    """The mix by nonnegative least squares of the relative residuals; None where no four lengths bear it.

    The share's interval inverts Student's test of a linear combination of the unconstrained parts (Fieller, J. Roy.
    Stat. Soc. B 16, 175, 1954): the shares that the values do not refuse.
    """
    from scipy import optimize, special

    free = len(x) - 3
    if free < 1:
        return None
    root = np.sqrt(noise**-2 / np.mean(noise**-2))
    terms = np.vander(x / x.max(), 3, increasing=True) * (root / y)[:, None]
    parts, norm = optimize.nnls(terms, root)
    loose, *_ = np.linalg.lstsq(terms, root, rcond=None)
    variance = max(float(np.sum((terms @ loose - root) ** 2)) / free, _LEAST_NOISE**2)
    reach = float(special.stdtrit(free, (1 + _LEVEL) / 2)) ** 2 * variance * np.linalg.pinv(terms.T @ terms)

    shares = np.linspace(0, 1, 1001)
    combinations = np.stack([-shares, -shares, 1 - shares], axis=1)
    spread = np.einsum("ni,ij,nj->n", combinations, reach, combinations)
    inside = np.append(shares[(combinations @ loose) ** 2 <= spread], parts[2] / parts.sum())
    overhead, linear, quadratic = map(float, parts)
    half = (linear + math.sqrt(linear**2 + 4 * overhead * quadratic)) / (2 * quadratic) if quadratic > 0 else math.inf
    ends = (float(inside.min()), float(inside.max()), half * float(x.max()))
    return Mix((overhead, linear, quadratic), *ends, norm / math.sqrt(free), _distinct(x))


def _refuses(mix: Mix, x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> bool:
    """Whether the mix explains the values better than a power law with an overhead or without: the information
    criterion favours it, and both growing parts count, the linear one at some length, the other at the longest."""
    linear = max(mix.parts[1] * length / x.max() / mix.at(length) for length in x)
    if linear < _COUNTS or mix.share < _COUNTS:
        return False
    parameters = sum(part > 0 for part in mix.parts)
    criterion = _criterion(mix.residual**2 * (len(x) - 3), len(x), parameters + 1)
    return criterion < min(_law(x, y, noise, with_overhead=each)[1] for each in (False, True)) - 2 * _EVIDENCE


def _widened(law: Growth, x: np.ndarray, y: np.ndarray, noise: np.ndarray) -> Growth:
    """A plain law, its interval also over that of the law with an overhead where the values may hold one.

    With few points the criterion takes an overhead for noise, or the law for one of a short range, and the interval of
    the plain law alone misses the exponent. On the longest range on which the law with an overhead holds as well, an F
    test of a low level decides.
    """
    from scipy import special

    for kept in (x >= first for first in _distinct(x)[:-_MIN_RANGE]):
        other, _ = _law(x[kept], y[kept], noise[kept], with_overhead=True)
        if other.residual <= max(HOLDS, law.residual) and other.overhead > 0:
            plain, _ = _law(x[kept], y[kept], noise[kept], with_overhead=False)
            free = other.n - 3
            gain = (plain.residual / max(other.residual, _LEAST_NOISE)) ** 2 * (free + 1) - free
            if gain > float(special.fdtri(1, free, _SUSPECT)):
                return replace(law, ci_low=min(law.ci_low, other.ci_low), ci_high=max(law.ci_high, other.ci_high))
            break
    return law


def _law(x: np.ndarray, y: np.ndarray, noise: np.ndarray, *, with_overhead: bool) -> tuple[Growth, float]:
    """The best law of one form and its information criterion: on a grid of exponents, then on a finer one about it."""
    from scipy import special

    n, parameters, root = len(x), 2 + with_overhead, np.sqrt(noise**-2 / np.mean(noise**-2))
    coarse, *_ = _squares(x, y, root, _EXPONENTS, with_overhead)
    place = int(coarse.argmin())
    near = _EXPONENTS[max(place - 1, 0)], _EXPONENTS[min(place + 1, len(_EXPONENTS) - 1)]
    exponents = np.linspace(*near, 2001)
    fine, overhead, scale = _squares(x, y, root, exponents, with_overhead)
    best = int(fine.argmin())
    least = float(fine[best])
    seen = least / (n - parameters) * float(special.fdtri(1, n - parameters, _LEVEL))
    bound = least + max(seen, _LEAST_NOISE**2 * float(special.chdtri(1, 1 - _LEVEL)))
    inside = np.concatenate([_EXPONENTS[coarse <= bound], exponents[fine <= bound]])
    law = Growth(
        exponent=float(exponents[best]),
        ci_low=float(inside.min()),
        ci_high=float(inside.max()),
        coefficient=float(np.log10(scale[best]) - exponents[best] * np.log10(x.max())),
        overhead=float(overhead[best]),
        residual=math.sqrt(least / (n - parameters)),
        n=n,
        lengths=_distinct(x),
    )
    return law, _criterion(least, n, parameters + 1)


def _squares(
    x: np.ndarray, y: np.ndarray, root: np.ndarray, exponents: np.ndarray, with_overhead: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each exponent, the least sum over weights · (1 - (a + b (x / x_max)^p) / y)² with a >= 0, which is linear;
    its a; and its b. `root`: of the weights."""
    constant = root / y
    grown = np.exp(np.outer(exponents, np.log(x / x.max())))
    grown *= constant
    gg, go = np.einsum("pn,pn->p", grown, grown), grown @ root
    overhead, scale = np.zeros(len(exponents)), go / gg
    if with_overhead:
        cc, co, gc = constant @ constant, constant @ root, grown @ constant
        determinant = gg * cc - gc**2
        solvable = determinant > 1e-12 * gg * cc  # not at exponent 0, where both parts are constant
        determinant = np.where(solvable, determinant, 1.0)
        a, b = (gg * co - gc * go) / determinant, (cc * go - gc * co) / determinant
        real = solvable & (a > 0) & (b > 0)
        overhead, scale = np.where(real, a, overhead), np.where(real, b, scale)
    residuals = root - scale[:, None] * grown
    if overhead.any():
        residuals -= overhead[:, None] * constant
    return np.einsum("pn,pn->p", residuals, residuals), overhead, scale


def _criterion(squares: float, n: int, parameters: int) -> float:
    """Akaike's criterion, corrected for few points; `parameters` counts the noise. Infinite with too few points."""
    if n <= parameters + 1:
        return math.inf
    exact = n * 1e-12  # values without noise: the simpler law is as good
    return n * math.log((squares + exact) / n) + 2 * parameters * n / (n - parameters - 1)


def _checked(
    lengths: Sequence[float], values: Sequence[float], spreads: Sequence[float] | None, least: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, values and their relative noise, `least` at least, as float64 [n] each. Raises as `fit_growth`."""
    x, y = np.asarray(lengths, dtype=float), np.asarray(values, dtype=float)
    if len(x) != len(y):
        raise ValueError(f"lengths and values differ in number: {len(x)} and {len(y)}")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        raise ValueError("lengths and values must be positive and finite; leave out what was not measured")
    return x, y, np.clip(np.zeros(len(x)) if spreads is None else np.asarray(spreads, dtype=float), least, _VAGUE)


def _distinct(x: np.ndarray) -> tuple[int, ...]:
    """Each length once, ascending."""
    return tuple(sorted({int(length) for length in x}))


@dataclass(frozen=True)
class LocalSlope:
    """Slope on log-log axes between two lengths, about an octave apart."""

    low: int  # the shortest and the longest length that it rests on
    high: int
    exponent: float  # the slope: 1 is linear, 2 quadratic
    error: float  # half of its 95 % interval, from the spread of the values

    def __str__(self) -> str:
        """The slope with the length at its end: "8K 1.5", "16K 1.2 ± 0.2", "2K to 16K 1.1" if it spans octaves."""
        start = f"{short(self.low)} to " if self.high > _FEW_OCTAVES * self.low else ""
        slope = round(self.exponent, 1) + 0.0  # not -0.0
        return f"{start}{short(self.high)} {slope:.1f}" + (f" ± {self.error:.1f}" if self.error > 0.1 else "")


def local_slopes(
    lengths: Sequence[float], values: Sequence[float], spreads: Sequence[float] | None = None
) -> tuple[LocalSlope, ...]:
    """Slopes of neighbouring octaves on log-log axes, shortest first; they show bends that a single fit hides.

    Octaves are counted from the longest length down; lengths within one share its slope, by least squares weighted
    with the spreads (as of `fit_growth`; 0.1 % at least). An octave without a length at its lower end reaches to the
    next one that was measured, as does one whose slope is less certain than ±0.25. Several values at one length count
    as their geometric mean. Raises ValueError as `fit_growth`.
    """
    x, y, noise = _checked(lengths, values, spreads, _LEAST_NOISE)
    at = {length: np.flatnonzero(x.astype(int) == length) for length in _distinct(x)}
    logs = np.log2(np.array(list(at), dtype=float))
    means = np.array([np.log2(y[places]).mean() for places in at.values()])
    errors = np.array([np.sqrt((noise[places] ** 2).sum()) / len(places) for places in at.values()]) / math.log(2)

    def slope(low: int, high: int) -> LocalSlope:
        """Weighted line through the means of these lengths."""
        weights = errors[low : high + 1] ** -2.0
        away = logs[low : high + 1] - np.average(logs[low : high + 1], weights=weights)
        squares = float(weights @ away**2)
        exponent = float(weights * away @ means[low : high + 1]) / squares
        return LocalSlope(list(at)[low], list(at)[high], exponent, NORMAL_INTERVAL / math.sqrt(squares))

    slopes: list[LocalSlope] = []
    high = len(at) - 1
    while high > 0:
        low = high - 1
        while low > 0 and (logs[high] - logs[low] < _OCTAVE or slope(low, high).error > _SURE):
            low -= 1
        slopes.append(slope(low, high))
        high = low
    return tuple(reversed(slopes))


def short(length: int) -> str:
    """A length in three digits: 512, 4K, 90.5K, 1M."""
    for size, suffix in ((2**20, "M"), (2**10, "K")):
        if length >= size:
            return f"{length / size:.3g}{suffix}"
    return str(length)
