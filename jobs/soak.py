"""Soak: hours of training in pieces, each in a fresh process. Does memory grow, does throughput drift, does it last?

A point is one kind of attention. The training is that of `train` with checkpoints (jobs.training); the time ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from jobs import train
from jobs.hardware.stats import SLOPE_INTERVAL, Slope, common_slope
from jobs.schema.axes import Axis
from jobs.schema.point import STARTING, Beat, Machine, Measurement, Metric, Point, Surroundings, reporter
from jobs.schema.quantities import Better, Quantity, Role
from jobs.training.checkpoints.folder import CheckpointFolder
from jobs.training.checkpoints.report import CheckpointSpec
from jobs.training.errors import Suspended, noting_sigterm
from jobs.training.launch import run_ranks
from jobs.training.live import LOSS
from jobs.training.metrics import common_metrics, compared, per_byte, speed, with_history
from jobs.training.report import RankReport
from jobs.training.soak import GB, HOST_MEMORY, MEMORY_HELD, Interval, SoakHistory, SoakPlan
from jobs.training.state import Run

__all__ = ["AXES", "QUANTITIES", "Case", "Spec", "measure"]

RESERVED_GROWTH = Quantity(
    "reserved_growth", "%/1000 steps", "Growth of the memory reserved", "memory growth", Better.LOWER, Role.HEADLINE
)
DRIVER_GROWTH = Quantity(
    "driver_growth", "%/1000 steps", "Growth of the memory in use on the card", better=Better.LOWER
)
HOST_GROWTH = Quantity("host_growth", "MiB/h", "Growth of the host memory", better=Better.LOWER)
PROCESS_CHECKPOINTS = Quantity("process_checkpoints", "1", "Most checkpoints of one process")
THROUGHPUT_DRIFT = Quantity(
    "throughput_drift", "%/h", "Drift of the throughput", "throughput drift", Better.HIGHER, Role.HEADLINE
)
ALERT_TIME = Quantity("alert_time", "min", "Training time above the alert", better=Better.LOWER)
SOAK_TIME = Quantity("soak_time", "h", "Training time of the soak")
PIECES = Quantity("pieces", "1", "Pieces of the soak")
INTERRUPTIONS = Quantity("interruptions", "1", "Interruptions of the soak", better=Better.LOWER)
RESTARTS = Quantity("restarts", "1", "Restarts of the ranks", better=Better.LOWER)
AXES = (*train.AXES, Axis("minutes", "whole", "minutes"))
QUANTITIES = (
    *(RESERVED_GROWTH, DRIVER_GROWTH, HOST_GROWTH, THROUGHPUT_DRIFT, *train.QUANTITIES, PROCESS_CHECKPOINTS),
    *(ALERT_TIME, SOAK_TIME, PIECES, INTERRUPTIONS, RESTARTS, MEMORY_HELD, HOST_MEMORY),
)

HISTORY = "soak.csv"
"""Name of the file with the intervals of the rank that holds the most memory."""

Case = train.Case

LEAST_CHECKPOINTS = 10
LEAST_PROCESSES = 3
"""Checkpoints of one process, and processes, without which growth is not judged."""

_MIB = 2**20
_START_S = 900  # of a point's deadline, for start-up, checkpoints and the check of the attention
_LONGEST_S = 10**6  # that a deadline can be


class Spec(train.TrainingSpec):
    """A long training for each kind of attention."""

    kind: Literal["soak"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    minutes: float = Field(gt=0, le=16_000, description="of training, over all pieces; start-ups do not count")
    piece_minutes: float = Field(gt=0, description="of training after which the process ends and a fresh one goes on")
    alert_gb: float = Field(
        default=60.0, gt=0, description="memory held by a rank that a warning is given for [10⁹ bytes]"
    )
    limit_gb: float = Field(default=65.0, gt=0, description="memory held by a rank that ends the point [10⁹ bytes]")
    steps: int = Field(
        default=50_000,
        ge=5,
        le=2**31,
        description="of the learning rate's schedule; later ones keep its lowest rate, as the time ends the soak",
    )
    checkpoints: CheckpointSpec = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - as above
        description="without one a process could not go on where another ended"
    )

    @model_validator(mode="after")
    def _check_pieces(self) -> Self:
        """Refuse pieces that are longer than the whole, and a limit that comes before the alert."""
        if self.piece_minutes > self.minutes:
            raise ValueError(
                f"piece_minutes: {self.piece_minutes:g}: is more than the {self.minutes:g} minutes; use fewer"
            )
        if self.alert_gb > self.limit_gb:
            raise ValueError(
                f"alert_gb: {self.alert_gb:g}: is above limit_gb {self.limit_gb:g}, which ends the point; exchange them"
            )
        return self

    @model_validator(mode="after")
    def _check_deadline(self) -> Self:
        """Give a point time for the whole soak, and refuse a deadline within it."""
        least = 60 * self.minutes
        if "point_s" not in self.deadlines.model_fields_set:
            point_s = min(_LONGEST_S, max(self.deadlines.point_s, 2 * least + _START_S))
            return self.model_copy(update={"deadlines": self.deadlines.model_copy(update={"point_s": point_s})})
        if self.deadlines.point_s <= least:
            raise ValueError(
                f"deadlines.point_s: {self.deadlines.point_s:g}: would end {self.minutes:g} minutes of training, which "
                f"are {least:g} s; use more, or leave it out"
            )
        return self

    def case_fields(self) -> Mapping[str, Any]:
        """As TrainingSpec."""
        return {"soak": SoakPlan(self.minutes, self.piece_minutes, self.alert_gb, self.limit_gb)}

    def points(self, machine: Machine) -> Sequence[Point]:
        """As TrainingSpec, with the time."""
        return [
            replace(
                point,
                label=f"{point.label} {self.minutes:g} min",
                axes=replace(point.axes, more={**point.axes.more, "minutes": int(self.minutes)}),
            )
            for point in super().points(machine)
        ]


def measure(case: Case, beat: Beat) -> Measurement:
    """Train piece by piece, each piece on ranks that are started anew; also one rank is a process of its own.

    Raises:
        RankFailed, WrongResult, Diverged, Ineffective, CheckpointError: as run_ranks.
        MemoryLimit: a rank held more memory than `limit_gb`.
        Suspended: SIGTERM came before the end.
        torch.OutOfMemoryError, RuntimeError: memory ran out (device; host).
    """
    restarts = 0
    with noting_sigterm() as stop:
        while True:
            reports = run_ranks(case, beat, stop)
            restarts += reports[0].environment["training"]["restarts"]
            history = _history(reports[0].run)
            if history.done:
                return _measurement(case, reports, restarts, _starts(reporter(beat).surroundings))
            if stop.is_set():
                raise Suspended(f"SIGTERM ended the soak after piece {history.pieces}: nsa submit SPEC --resume RUN")
            beat(STARTING)


def _starts(there: Surroundings) -> int:
    assert there.checkpoints is not None, "a soak without them does not get so far"
    return CheckpointFolder(there.checkpoints).starts(there.key)


def _measurement(case: Case, reports: Sequence[RankReport], restarts: int, starts: int) -> Measurement:
    """Results of a whole soak from the reports of its last process, by rank.

    Times and losses are the first rank's; memory is that of the rank that holds the most.

    Args:
        restarts: of all pieces in this attempt.
        starts: of all attempts, each of all ranks together.
    """
    assert case.soak is not None
    first, worst = reports[0], max(reports, key=lambda each: _highest(_history(each.run), lambda i: i.held))
    history = _history(worst.run)
    metrics = [
        *_memory([_history(report.run) for report in reports], case.soak),
        *_times(case, first),
        *_ranks([report.run for report in reports], case.soak),
        *_counts(history, starts),
        Metric.of(RESTARTS, restarts, method="of this attempt, after a rank had died, with a checkpoint or without"),
        *common_metrics(case, reports, worst),
    ]
    environment = with_history(first)
    environment["training"] = {**environment["training"], "restarts": restarts}
    return Measurement(tuple(metrics), first.route, environment, {**worst.peak.files, HISTORY: history.to_csv()})


def _history(run: Run) -> SoakHistory:
    assert run.soak is not None
    return run.soak


def _highest(history: SoakHistory, size: Callable[[Interval], int]) -> float:
    """The highest of sizes over all intervals [MiB]."""
    return max((size(interval) for interval in history.intervals), default=0) / _MIB


def _memory(histories: Sequence[SoakHistory], plan: SoakPlan) -> list[Metric]:
    """Highest memory and its growth, each of the rank where it is most."""
    gpu = any(interval.allocated for history in histories for interval in history.intervals)
    held = "memory reserved on the GPU" if gpu else "resident memory"
    worst = max(histories, key=lambda each: _highest(each, lambda i: i.held))
    sizes = tuple(interval.held / _MIB for interval in worst.intervals)
    metrics = [
        Metric.of(MEMORY_HELD, max(sizes, default=0.0), sizes, f"highest {held} over all processes; samples: intervals")
    ]
    settled = [history.settled(plan) for history in histories]
    if gpu:
        highest = max(_highest(history, lambda i: i.resident) for history in histories)
        metrics.append(Metric.of(HOST_MEMORY, highest, method="highest resident memory over all processes"))
        metrics += _growth(RESERVED_GROWTH, settled, lambda i: i.reserved, held, by_step=True)
        metrics += _growth(DRIVER_GROWTH, settled, lambda i: i.driver, "memory in use on the card", by_step=True)
    return [*metrics, *_growth(HOST_GROWTH, settled, lambda i: i.resident, "resident memory", by_step=False)]


def _growth(
    quantity: Quantity,
    ranks: Sequence[Sequence[Interval]],
    size: Callable[[Interval], int],
    what: str,
    *,
    by_step: bool,
) -> list[Metric]:
    """Growth of memory on the rank where it is fastest; none with too few checkpoints or processes to see it.

    A level of its own is granted to no process beyond its first checkpoint, so that readings before it are left out.
    What leaks within a process shows in the slope there, and what stays when a process has ended in the next one's
    level; the first process, which loaded no checkpoint, lies lower than all others and is not compared with them.

    Args:
        ranks: settled intervals by rank.
        by_step: in percent of the mean by 1,000 steps; else in MiB by hour.
    """
    metrics = []
    for intervals in ranks:
        used = [each for each in intervals if each.checkpoints]
        processes = np.array([each.process for each in used])
        if len(unique := np.unique(processes)) < LEAST_PROCESSES:
            continue
        x = np.array([each.thousands if by_step else each.hours for each in used])
        y = np.array([size(each) / _MIB for each in used])
        within = common_slope(processes, x, y)
        if within is None or max(each.checkpoints for each in used) < LEAST_CHECKPOINTS:
            continue
        means = np.array([(x[processes == each].mean(), y[processes == each].mean()) for each in unique[1:]])
        between = float(np.polyfit(means[:, 0], means[:, 1], 1)[0])
        slope = within if within.value >= between else Slope(between, None, None)
        scale = 100 / y.mean() if by_step else 1.0
        low, high = (None if end is None else scale * end for end in (slope.low, slope.high))
        where = f"within processes; {SLOPE_INTERVAL}" if slope is within else "from one process to the next"
        method = f"{what} from each process's first checkpoint on, the faster of two growths: {where}"
        metrics.append(
            Metric(quantity.name, quantity.unit, scale * slope.value, ci_low=low, ci_high=high, method=method)
        )
    return [max(metrics, key=lambda metric: metric.value)] if metrics else []


def _times(case: Case, report: RankReport) -> list[Metric]:
    """Step time, throughput and its drift, figures of the plan if any, and the loss."""
    assert case.soak is not None
    intervals, (settled, words) = _history(report.run).intervals, _settled(report.run, case.soak)
    losses = tuple(interval.loss / interval.steps for interval in intervals)
    last = losses[-max(1, len(losses) // 10) :]
    method = f"mean of the last {len(last)} intervals; samples: means of all intervals{per_byte(case)}"
    return [
        *speed(case, report, [i.seconds / i.steps for i in settled], words),
        *_drift(settled, case.tokens),
        Metric.of(LOSS, fmean(last), losses, method),
    ]


def _drift(intervals: Sequence[Interval], tokens: int) -> list[Metric]:
    """Slope of the throughput in percent of its mean, through all processes; none with too few intervals."""
    values = [tokens * each.steps / each.seconds for each in intervals]
    slope = common_slope([0] * len(values), [each.hours for each in intervals], values)
    if slope is None:
        return []
    scale = 100 / fmean(values)
    low, high = (None if end is None else scale * end for end in (slope.low, slope.high))
    method = f"throughput in percent of its mean: least squares over {len(values)} intervals; {SLOPE_INTERVAL}"
    name, unit = THROUGHPUT_DRIFT.name, THROUGHPUT_DRIFT.unit
    return [Metric(name, unit, scale * slope.value, ci_low=low, ci_high=high, method=method)]


def _settled(run: Run, plan: SoakPlan) -> tuple[list[Interval], str]:
    """The intervals that count for times, of a short soak the last one; and which they are, in words."""
    words = f"means of intervals of {plan.interval_s:.3g} s, the first {plan.warm_up_s:.3g} s of each process left out"
    return _history(run).settled(plan) or _history(run).intervals[-1:], words


def _ranks(runs: Sequence[Run], plan: SoakPlan) -> list[Metric]:
    """Comparison of several ranks."""
    steps, compute, busy, words = [], [], [], ""  # time and own compute time of a step [ms]; utilisation [%]
    for run in runs:
        mine, words = _settled(run, plan)
        steps.append(median(1000 * i.seconds / i.steps for i in mine))
        measured = [i for i in mine if i.compute_ms]
        compute.append(sum(i.compute_ms for i in measured) / sum(i.steps for i in measured) if measured else None)
        looks = sum(i.looks for i in mine)
        busy.append(sum(i.busy for i in mine) / looks if looks else None)
    of_compute, of_looks = f"all steps, by {words}", f"looks once a second, {words}"
    return compared((steps, f"median of each rank's {words}"), (compute, of_compute), (busy, of_looks))


def _counts(history: SoakHistory, starts: int) -> list[Metric]:
    ends = "starts of the ranks that did not train to the end of their piece: killed, failed or told to stop"
    alert = f"memory held, of the rank that holds the most; samples once a second; 1 GB = {GB:,} bytes"
    most = max((each.checkpoints for each in history.intervals), default=0)
    return [
        Metric.of(SOAK_TIME, history.elapsed_s / 3600, method="without checkpoints, held-out losses and start-up"),
        Metric.of(PIECES, history.pieces, method="processes that trained to the end of their piece"),
        Metric.of(INTERRUPTIONS, max(0, starts - history.pieces), method=ends),
        Metric.of(PROCESS_CHECKPOINTS, most, method=f"growth needs {LEAST_CHECKPOINTS}, and {LEAST_PROCESSES} pieces"),
        Metric.of(ALERT_TIME, history.alert_s / 60, method=alert),
    ]
