"""Time of the sparse attention by branch: its share at each length, and where the compressed branch takes over.

A stage's name, given by its launch in nsa_core/kernels, tells its branch. The compressed branch alone is quadratic: a
query sees S / cmp_stride compressed keys at most. Its scores and the choice of blocks visit the same keys and count to
it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from orchestrator.judge.analysis import series_columns, series_of
from orchestrator.judge.growth import HOLDS, MIN_LENGTHS, Growth, fit_growth

STAGE = "stage_"
_FAR = 4  # times the longest length up to which a crossing is extrapolated
_ENDLESS = 100  # octaves beyond the longest length
_SPLIT_HOLDS = 0.1  # largest relative residual with which a shared stage is split


class Branch(StrEnum):
    """Part of the operator that a stage works for."""

    COMPRESSED = "compressed"  # with its scores and the choice of blocks
    SELECTED = "selected"
    WINDOW = "window"  # with the forced blocks of the selection, which the same kernels visit
    REST = "rest"  # compression, merging, gates
    OTHER = "other"  # PyTorch's kernels, and stages of unknown names
    SHARED = "shared"  # stages of the compressed branch and the window that the lengths do not allow to split


# Stages by name without direction; a launch over several spans has their names in turn ("compressed_window_forced").
_SPANS = {"compressed": Branch.COMPRESSED, "window": Branch.WINDOW, "forced": Branch.WINDOW}
_STAGES = {
    **dict.fromkeys(("scores", "topk"), Branch.COMPRESSED),
    **dict.fromkeys(("selected", "inverse_index", "sum_items"), Branch.SELECTED),
    **dict.fromkeys(("compress", "merge", "gates", "sum_chunks"), Branch.REST),
}
_DIRECTION = re.compile(r"_backward(_q|_kv)?$")


def branch_of(stage: str) -> Branch:
    """The branch of a stage, named without "stage_"; SHARED for a launch of the compressed branch and the window."""
    name = _DIRECTION.sub("", stage)
    spans = {_SPANS.get(word) for word in name.split("_")}
    if None in spans:
        return _STAGES.get(name, Branch.OTHER)
    return _SPANS[name.split("_")[0]] if len(spans) == 1 else Branch.SHARED


@dataclass(frozen=True)
class BranchShares:
    """Device time by branch of one series at one length."""

    series: Mapping[str, Any]  # the series' values of `series_columns`, without metric and unit; None: missing
    seq_len: int
    batch: int
    milliseconds: Mapping[Branch, float]  # of a call, by branch in the order of `Branch`; those that ran
    unknown: tuple[str, ...] = ()  # stages of unknown names, which count as other

    def share(self, branch: Branch) -> float:
        """The branch's part of the time of all stages, 0 to 1."""
        return self.milliseconds.get(branch, 0.0) / sum(self.milliseconds.values())

    def per_sequence(self, branches: Collection[Branch]) -> float:
        """Milliseconds of these branches, divided by the batch."""
        return sum(self.milliseconds.get(branch, 0.0) for branch in branches) / self.batch


def branch_shares(rows: pd.DataFrame) -> list[BranchShares]:
    """Shares of every series in `rows` (of the view v_metrics) with stages, by series and length.

    The stages that the compressed branch shares with the window are split: per token, the window costs a constant and
    the compressed branch a multiple of S. Both are fitted over the series' lengths by least squares of the relative
    residuals, and each measured time is divided in the fitted proportion. With fewer than three lengths, or residuals
    over 10 %, the time stays SHARED. Several points at a length count as their mean.
    """
    staged = rows.loc[rows["metric"].str.startswith(STAGE) & (rows["seq_len"] > 0)]
    columns = [name for name in series_columns(rows.columns) if name not in ("metric", "unit")]
    shares = []
    for identity, group in staged.groupby(columns, dropna=False, sort=True):
        of_series = []
        for length, at in group.groupby("seq_len"):
            points, batch = at["point_id"].nunique(), at["batch"].iloc[0]
            times, unknown = dict.fromkeys(Branch, 0.0), set()
            for name, value in zip(at["metric"], at["value"].tolist(), strict=True):
                stage = name.removeprefix(STAGE)
                branch = branch_of(stage)
                times[branch] += value / points
                unknown |= {stage} - {Branch.OTHER} if branch is Branch.OTHER else set()
            times = {branch: time for branch, time in times.items() if time > 0}
            batch = 1 if pd.isna(batch) else int(batch)
            series = series_of(columns, identity)
            of_series.append(BranchShares(series, int(length), batch, times, tuple(sorted(unknown))))
        shares += _split(of_series)
    return shares


def _split(shares: list[BranchShares]) -> list[BranchShares]:
    """The shares of a series with the shared stages split, if their lengths allow it."""
    lengths = np.array([one.seq_len for one in shares], dtype=float)
    times = np.array([one.per_sequence([Branch.SHARED]) for one in shares]) / lengths
    if len(shares) < MIN_LENGTHS or min(times) <= 0:
        return shares
    from scipy import optimize  # takes long to import, and most runs have no shared stages

    terms = np.stack([1 / times, lengths / times], axis=1)
    (constant, slope), _ = optimize.nnls(terms, np.ones(len(times)))
    if np.abs(terms @ (constant, slope) - 1).max() > _SPLIT_HOLDS:
        return shares
    split = []
    for one, part in zip(shares, (slope * lengths / (constant + slope * lengths)).tolist(), strict=True):
        parts = {branch: one.milliseconds.get(branch, 0.0) for branch in Branch}
        shared = parts.pop(Branch.SHARED)
        parts[Branch.COMPRESSED] += part * shared
        parts[Branch.WINDOW] += (1 - part) * shared
        split.append(replace(one, milliseconds={branch: time for branch, time in parts.items() if time > 0}))
    return split


class Crossing(NamedTuple):
    """Length from which on the compressed branch costs more than others, with its bounds; infinite with the reason."""

    seq_len: float
    words: str

    @property
    def when(self) -> str:
        return f"{'from' if math.isfinite(self.seq_len) else 'at no known length:'} {self.words}"


class TakeOver(NamedTuple):
    """Where the compressed branch of one series takes over."""

    series: Mapping[str, Any]  # as in `BranchShares`
    compressed: Growth | None  # None with fewer than three lengths, or if not all lengths have both
    rest: Growth | None  # of all other branches together
    largest: Crossing  # where it becomes the largest branch
    equal: Crossing  # where it costs as much as all others together

    @property
    def sentence(self) -> str:
        """The growth of both and the two lengths."""
        both = self.compressed and self.rest
        grows = f"The compressed branch grows as {self.compressed}, the rest as {self.rest}. " if both else ""
        return (
            f"{grows}It is the largest branch {self.largest.when}; it costs as much as all the rest {self.equal.when}."
        )


def take_overs(shares: Sequence[BranchShares]) -> list[TakeOver]:
    """The take-over in every series of `shares`, in their order."""
    by_series: dict[tuple[Any, ...], list[BranchShares]] = defaultdict(list)
    for one in shares:
        by_series[tuple(one.series.values())].append(one)
    return [_take_over(of_series) for of_series in by_series.values()]


def _take_over(shares: Sequence[BranchShares]) -> TakeOver:
    """The take-over in one series; `shares`: its lengths, ascending."""
    others = [branch for branch in Branch if branch is not Branch.COMPRESSED]
    lengths = [one.seq_len for one in shares]
    compressed, rest, *single = (
        [one.per_sequence(branches) for one in shares]
        for branches in ([Branch.COMPRESSED], others, *([branch] for branch in others))
    )
    reason = ""
    if any(Branch.SHARED in one.milliseconds for one in shares):
        reason = "the compressed branch runs in stages with the window, and these lengths do not tell them apart"
    elif min(compressed) == 0:
        reason = "no stage of the compressed branch was measured at every length"
    elif min(rest) == 0:
        reason = "no other stage was measured at every length"
    if reason:
        unknown = Crossing(math.inf, reason)
        return TakeOver(shares[0].series, None, None, unknown, unknown)
    equal = _crossing(lengths, compressed, rest)
    rivals = (_crossing(lengths, compressed, rival) for rival in single if min(rival) > 0)
    largest = max(rivals, key=lambda crossing: crossing.seq_len)
    return TakeOver(shares[0].series, fit_growth(lengths, compressed), fit_growth(lengths, rest), largest, equal)


def _crossing(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> Crossing:
    """The length from which on `ours` is the greater.

    Between measured lengths by a line on log-log axes; beyond them by both exponents.
    """
    longest = lengths[-1]
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    below = [index for index, ratio in enumerate(ratios) if ratio < 1]
    if not below:
        return Crossing(lengths[0], f"{lengths[0]:,.0f} tokens or fewer (the shortest length measured)")
    if (last := below[-1]) < len(lengths) - 1:
        low, high = lengths[last : last + 2]
        part = math.log(1 / ratios[last]) / math.log(ratios[last + 1] / ratios[last])
        seq_len = low * (high / low) ** part
        bounds = f"between the measured {low:,.0f} and {high:,.0f}"
        return Crossing(seq_len, f"about {float(f'{seq_len:.2g}'):,.0f} tokens ({bounds})")
    law, other = fit_growth(lengths, ours), fit_growth(lengths, theirs)
    seq_len = low = high = math.inf
    if law is None or other is None:
        reason = f"fewer than {MIN_LENGTHS} lengths were measured, all below it"
    elif max(law.residual, other.residual) > HOLDS:
        reason = f"it lies beyond {longest:,}, and no law of growth holds"
    elif law.refused or other.refused:
        reason = f"it lies beyond {longest:,}, and no power law describes the growth of both"
    elif law.ci_low <= other.ci_high:
        reason = f"it lies beyond {longest:,}, and the growth of both is not told apart"
    else:
        faster = law.exponent - other.exponent, law.ci_high - other.ci_low, law.ci_low - other.ci_high
        octaves = [-math.log2(ratios[-1]) / difference for difference in faster]
        seq_len, low, high = (longest * 2**more if more < _ENDLESS else math.inf for more in octaves)
        reason = f"it lies beyond {_FAR * longest:,}, {_FAR} times the longest length measured"
    if seq_len > _FAR * longest:
        return Crossing(math.inf, reason)
    length, low, high = (float(f"{each:.2g}") for each in (seq_len, low, high))
    end = f"to {high:,.0f}" if math.isfinite(high) else "or more"
    return Crossing(seq_len, f"about {length:,.0f} tokens (extrapolated: {low:,.0f} {end})")
