"""Metrics of a soak from the histories of its ranks: slopes of memory, drift of the throughput, times and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from jobs.schema.point import Measurement, Metric
from jobs.schema.quantities import Better, Quantity, Role
from jobs.training import metrics as of_training
from jobs.training.case import TextCase
from jobs.training.live import LOSS
from jobs.training.metrics import compared
from jobs.training.report import RankReport
from jobs.training.soak.history import GB, Interval, SoakHistory, SoakPlan
from jobs.training.soak.watch import HOST_MEMORY, MEMORY_HELD

MEMORY_SLOPE = Quantity(
    "memory_slope", "MiB/h", "Growth of the memory held", "memory slope", Better.LOWER, Role.HEADLINE
)
MEMORY_GROWTH = Quantity("memory_growth", "%/1000 steps", "Growth of the memory held by step", better=Better.LOWER)
ALLOCATED_SLOPE = Quantity("allocated_slope", "MiB/h", "Growth of the memory allocated", better=Better.LOWER)
HOST_MEMORY_SLOPE = Quantity("host_memory_slope", "MiB/h", "Growth of the host memory", better=Better.LOWER)
THROUGHPUT_DRIFT = Quantity(
    "throughput_drift", "%/h", "Drift of the throughput", "throughput drift", Better.HIGHER, Role.HEADLINE
)
ALERT_TIME = Quantity("alert_time", "min", "Training time above the alert", better=Better.LOWER)
SOAK_TIME = Quantity("soak_time", "h", "Training time of the soak")
PIECES = Quantity("pieces", "1", "Pieces of the soak")
INTERRUPTIONS = Quantity("interruptions", "1", "Interruptions of the soak", better=Better.LOWER)
RESTARTS = Quantity("restarts", "1", "Restarts of the ranks", better=Better.LOWER)
SLOPES = (MEMORY_SLOPE, MEMORY_GROWTH, ALLOCATED_SLOPE, HOST_MEMORY_SLOPE, THROUGHPUT_DRIFT)
COUNTS = (ALERT_TIME, SOAK_TIME, PIECES, INTERRUPTIONS, RESTARTS, MEMORY_HELD, HOST_MEMORY)

HISTORY = "soak.csv"
"""Name of the file with the intervals of the rank that holds the most memory."""

MIB = 2**20
_LEFT_OUT = "means of intervals of {:.3g} s, the first {:.3g} s of each process left out"


def soak_measurement(case: TextCase, reports: Sequence[RankReport], restarts: int) -> Measurement:
    """Results of a whole soak from the reports of its last process, by rank.

    Times and losses are the first rank's; memory is that of the rank that holds the most.

    Args:
        restarts: of all pieces in this attempt.
    """
    plan = case.soak
    assert plan is not None
    first, worst = reports[0], max(reports, key=lambda each: max((i.held for i in _history(each).intervals), default=0))
    agreement = max((report.agreement for report in reports), key=lambda found: found.error / found.bound)
    metrics = [
        *_memory(worst, plan),
        *_times(case, first, plan),
        *of_training.energy_per_token([report.energy for report in reports]),
        *_ranks(reports, plan),
        *_counts(worst),
        Metric.of(RESTARTS, restarts, method="of this attempt, after a rank had died, with a checkpoint or without"),
        *of_training.heldout_losses(case, first.run),
    ]
    metrics += [*of_training.memory(case, worst), *of_training.checkpoint_costs(first), *agreement.metrics()]
    training = {**first.environment["training"], **of_training.history(first), "restarts": restarts}
    environment = {**first.environment, "training": training}
    files = {**worst.peak.files, HISTORY: _history(worst).to_csv()}
    return Measurement(tuple(metrics), first.route, environment, files)


def _history(report: RankReport) -> SoakHistory:
    assert report.run.soak is not None
    return report.run.soak


def _settled(report: RankReport, plan: SoakPlan) -> list[Interval]:
    """The intervals that count for times; of a short soak the last one."""
    return list(_history(report).settled(plan)) or _history(report).intervals[-1:]


def _slope(
    quantity: Quantity,
    intervals: Sequence[Interval],
    y: Callable[[Interval], float],
    what: str,
    x: Callable[[Interval], float] = lambda i: i.hours,
    *,
    relative: bool = False,
    levels: bool = True,
) -> list[Metric]:
    """Slope of y against x over intervals; none with too few of them.

    Args:
        what: y in words.
        relative: in percent of the mean of y.
        levels: processes have levels of their own, before their first checkpoint and after.
    """
    values = [y(interval) for interval in intervals]
    pieces = [interval.memory_level if levels else 0 for interval in intervals]
    slope = common_slope(pieces, [x(interval) for interval in intervals], values)
    if slope is None:
        return []
    scale = 100 / fmean(values) if relative else 1.0
    low, high = (None if end is None else scale * end for end in (slope.low, slope.high))
    fit = f"least squares over {len(values)} intervals"
    fit += ", one slope and levels of each process before and after its first checkpoint" * levels
    method = f"{what}: {fit}; {INTERVAL}"
    return [Metric(quantity.name, quantity.unit, scale * slope.value, ci_low=low, ci_high=high, method=method)]


def _memory(report: RankReport, plan: SoakPlan) -> list[Metric]:
    """Highest memory and its slopes, of one rank."""
    history = _history(report)
    settled = list(history.settled(plan))
    sizes = tuple(interval.held / MIB for interval in history.intervals)
    gpu = any(interval.allocated for interval in history.intervals)
    held = "memory reserved on the GPU" if gpu else "resident memory"
    method = f"highest {held} over all processes; samples: intervals"

    def thousands(interval: Interval) -> float:
        """Thousands of steps until its middle."""
        return (interval.end_step - interval.steps / 2) / 1000

    found = [
        Metric.of(MEMORY_HELD, max(sizes, default=0.0), sizes, method),
        *_slope(MEMORY_SLOPE, settled, lambda i: i.held / MIB, held),
        *_slope(
            MEMORY_GROWTH, settled, lambda i: i.held / MIB, f"{held} in percent of its mean", thousands, relative=True
        ),
    ]
    if gpu:
        allocated = "highest memory allocated in an interval"
        found += _slope(ALLOCATED_SLOPE, settled, lambda i: i.allocated / MIB, allocated)
        found += _slope(HOST_MEMORY_SLOPE, settled, lambda i: i.resident / MIB, "resident memory")
        highest = max(interval.resident for interval in history.intervals) / MIB
        found.append(Metric.of(HOST_MEMORY, highest, method="highest resident memory over all processes"))
    return found


def _times(case: TextCase, report: RankReport, plan: SoakPlan) -> list[Metric]:
    """Step time, throughput and its drift, figures of the plan if any, and the loss."""
    intervals, settled = _history(report).intervals, _settled(report, plan)
    words = _LEFT_OUT.format(plan.interval_s, plan.warm_up_s)
    drift = _slope(
        THROUGHPUT_DRIFT,
        settled,
        lambda i: case.tokens * i.steps / i.seconds,
        "throughput in percent of its mean",
        relative=True,
        levels=False,
    )
    losses = tuple(interval.loss / interval.steps for interval in intervals)
    last = losses[-max(1, len(losses) // 10) :]
    method = f"mean of the last {len(last)} intervals; samples: means of all intervals{of_training.per_byte(case)}"
    return [
        *of_training.speed(case, report, [i.seconds / i.steps for i in settled], words),
        *drift,
        Metric.of(LOSS, fmean(last), losses, method),
    ]


def _ranks(reports: Sequence[RankReport], plan: SoakPlan) -> list[Metric]:
    """Comparison of several ranks."""
    words = _LEFT_OUT.format(plan.interval_s, plan.warm_up_s)
    settled = [_settled(report, plan) for report in reports]
    steps = [median(1000 * i.seconds / i.steps for i in mine) for mine in settled]
    compute, busy = [], []  # own compute time of a step [ms], and utilisation [%]; None where they are unknown
    for mine in settled:
        known = [i for i in mine if i.compute_ms]
        compute.append(sum(i.compute_ms for i in known) / sum(i.steps for i in known) if known else None)
        looks = sum(i.looks for i in mine)
        busy.append(sum(i.busy for i in mine) / looks if looks else None)
    own, looked = f"all steps, by {words}", f"looks once a second, {words}"
    return compared((steps, f"median of each rank's {words}"), (compute, own), (busy, looked))


def _counts(report: RankReport) -> list[Metric]:
    history = _history(report)
    processes = sum(step >= report.run.foreign for step in report.run.begun)
    ends = "processes that ended before their piece did, and had saved a checkpoint"
    plan_gb = f"memory held, of the rank that holds the most; samples once a second; 1 GB = {GB:,} bytes"
    return [
        Metric.of(SOAK_TIME, history.elapsed_s / 3600, method="without checkpoints, held-out losses and start-up"),
        Metric.of(PIECES, history.pieces, method="processes that trained to the end of their piece"),
        Metric.of(INTERRUPTIONS, max(0, processes - history.pieces), method=ends),
        Metric.of(ALERT_TIME, history.alert_s / 60, method=plan_gb),
    ]


_LEAST = 3  # readings beyond one for each piece, for the slope to have an error

INTERVAL = "95 % interval by Student's t, readings thinned by their lag-1 autocorrelation (Santer et al. 2000)"
"""The interval of a slope, in words."""


@dataclass(frozen=True)
class Slope:
    """A slope in units of y by units of x, with its 95 % interval; None where the readings are too alike in a row."""

    value: float
    low: float | None
    high: float | None


def common_slope(pieces: Sequence[int], x: Sequence[float], y: Sequence[float]) -> Slope | None:
    """Slope of y against x that all pieces share, whatever the level of each; None with too few readings.

    The within estimator of panel data: both are taken as deviations from their piece's means, which gives the slope of
    a least-squares fit with a dummy variable for each piece (Frisch and Waugh, Econometrica 1, 1933). Readings in a row
    are alike, so that the interval rests on n (1 - r) / (1 + r) of them, r being the lag-1 autocorrelation of the
    residuals (Santer et al., J. Geophys. Res. 105(D6), 7337, 2000).

    Args:
        pieces: the piece of each reading; readings of a piece follow each other.
    """
    numbers, levels = np.unique(np.asarray(pieces), return_inverse=True)
    deviations = []  # from the mean of their piece
    for values in (np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)):
        deviations.append(values - (np.bincount(levels, values) / np.bincount(levels))[levels])
    xs, ys = deviations
    spread = float(xs @ xs)
    if len(xs) < len(numbers) + _LEAST or spread == 0:
        return None
    value = float(xs @ ys) / spread
    residuals = ys - value * xs
    squares = float(residuals @ residuals)
    if squares <= 1e-24 * max(1.0, float(np.max(np.abs(y))) ** 2) * len(xs):  # exact but for rounding
        return Slope(value, value, value)
    followers = np.flatnonzero(levels[1:] == levels[:-1])
    likeness = max(0.0, float(residuals[followers] @ residuals[followers + 1]) / squares)
    freedom = len(xs) * (1 - likeness) / (1 + likeness) - len(numbers) - 1
    if freedom < 1:
        return Slope(value, None, None)
    from scipy import special  # takes long to import; scipy.stats four times as long

    reach = float(special.stdtrit(freedom, 0.975)) * math.sqrt(squares / freedom / spread)
    return Slope(value, value - reach, value + reach)
