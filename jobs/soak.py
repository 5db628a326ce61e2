"""Soak: hours of training in pieces, each in a fresh process. Does memory grow, does throughput drift, does it last?

A point is one kind of attention. The training is that of `train` with checkpoints (jobs.training); the time ends it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from jobs import train
from jobs.hardware.stats import SLOPE_INTERVAL, Slope, common_slope
from jobs.schema.axes import Axis
from jobs.schema.point import STARTING, Beat, Machine, Measurement, Metric, Point, reporter
from jobs.schema.quantities import Better, Quantity, Role
from jobs.training.case import CheckpointSpec
from jobs.training.checkpoints.folder import CheckpointFolder
from jobs.training.errors import Suspended, noting_sigterm
from jobs.training.launch import run_ranks
from jobs.training.live import LOSS
from jobs.training.metrics import common_metrics, compared, per_byte, speed
from jobs.training.rank import RankReport
from jobs.training.soak import GB, HOST_MEMORY, MEMORY_HELD, Interval, SoakHistory, SoakPlan

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

HISTORY = "soak.csv"  # the file with the intervals of the rank that holds the most memory
LEAST_CHECKPOINTS, LEAST_PROCESSES = (10, 3)  # of one process, and of all, without which growth is not judged
Case = train.Case

_START_S = 900  # of a point's deadline, for start-up, checkpoints and the check of the attention
_LONGEST_S = 10**6  # that a deadline can be


class Spec(train.TrainingSpec):
    """A long training for each kind of attention."""

    kind: Literal["soak"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    minutes: float = Field(gt=0, le=16_000, description="of training, over all pieces; start-ups do not count")
    piece_minutes: float = Field(gt=0, description="of training after which the process ends and a fresh one goes on")
    alert_gb: float = Field(default=60.0, gt=0, description="memory held by a rank that is a warning [10⁹ bytes]")
    limit_gb: float = Field(default=65.0, gt=0, description="memory held by a rank that ends the point [10⁹ bytes]")
    steps: int = Field(default=50_000, ge=5, le=2**31, description="of the schedule; later ones keep its lowest rate")
    checkpoints: CheckpointSpec = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - as above
        description="without one a process could not go on where another ended"
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        """Refuse pieces longer than the whole, a limit before the alert, and a deadline within the soak; without one
        give the point time for all of it."""
        if self.piece_minutes > self.minutes:
            raise ValueError(
                f"piece_minutes: {self.piece_minutes:g}: is more than the {self.minutes:g} minutes; use fewer"
            )
        if self.alert_gb > self.limit_gb:
            raise ValueError(
                f"alert_gb: {self.alert_gb:g}: is above limit_gb {self.limit_gb:g}, which ends the point; exchange them"
            )
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
        return {"soak": SoakPlan(self.minutes, self.piece_minutes, self.alert_gb, self.limit_gb)}

    def points(self, machine: Machine) -> Sequence[Point]:
        """As TrainingSpec, with the time."""
        points = []
        for point in super().points(machine):
            axes = replace(point.axes, more={**point.axes.more, "minutes": int(self.minutes)})
            points.append(replace(point, label=f"{point.label} {self.minutes:g} min", axes=axes))
        return points


def measure(case: Case, beat: Beat) -> Measurement:
    """Train piece by piece, each piece on ranks that are started anew; also one rank is a process of its own.

    Times and losses are the first rank's; memory is that of the rank that holds the most. Raises as run_ranks.
    """
    assert case.soak is not None
    there, restarts = reporter(beat).surroundings, 0
    if (pieces := math.ceil(case.soak.minutes / case.soak.piece_minutes)) < LEAST_PROCESSES:
        fault = f"gives {pieces} process(es), and growth of memory is judged over {LEAST_PROCESSES}"
        reporter(beat).warn(
            f"piece_minutes: {case.soak.piece_minutes:g}: {fault}; use {case.soak.minutes / LEAST_PROCESSES:.3g}"
        )
    with noting_sigterm() as stop:
        while True:
            reports = run_ranks(case, beat, stop)
            first = reports[0]
            restarts += first.environment["training"]["restarts"]
            histories = [report.run.soak for report in reports if report.run.soak is not None]
            if histories[0].done:
                break
            if stop.is_set():
                text = f"SIGTERM ended the soak after piece {histories[0].pieces}"
                raise Suspended(f"{text}: nsa submit SPEC --resume RUN")
            beat(STARTING)
    assert there.checkpoints is not None, "a soak without them does not get so far"
    starts = CheckpointFolder(there.checkpoints).starts(there.key)  # of all attempts, each of all ranks together
    first.environment["training"]["restarts"] = restarts
    most = max(range(len(reports)), key=lambda rank: max((each.held for each in histories[rank].intervals), default=0))
    worst, history = reports[most], histories[most]
    checkpoints = max((each.checkpoints for each in history.intervals), default=0)
    ends = "starts of the ranks that did not train to the end of their piece: killed, failed or told to stop"
    alert = f"memory held, of the rank that holds the most; samples once a second; 1 GB = {GB:,} bytes"
    needed = f"growth needs {LEAST_CHECKPOINTS}, and {LEAST_PROCESSES} pieces"
    died = "of this attempt, after a rank had died, with a checkpoint or without"
    metrics = [
        *memory(histories, case.soak),
        *_times(case, first, histories[0]),
        *compare_ranks(histories, case.soak),
        Metric.of(SOAK_TIME, history.elapsed_s / 3600, method="without checkpoints, held-out losses and start-up"),
        Metric.of(PIECES, history.pieces, method="processes that trained to the end of their piece"),
        Metric.of(INTERRUPTIONS, max(0, starts - history.pieces), method=ends),
        Metric.of(PROCESS_CHECKPOINTS, checkpoints, method=needed),
        Metric.of(ALERT_TIME, history.alert_s / 60, method=alert),
        Metric.of(RESTARTS, restarts, method=died),
        *common_metrics(case, reports, worst),
    ]
    files = {**worst.peak.files, HISTORY: history.to_csv()}
    return Measurement(tuple(metrics), first.state.route, first.environment, files)


def memory(histories: Sequence[SoakHistory], plan: SoakPlan) -> list[Metric]:
    """Highest memory and its growth, each of the rank where it is most."""
    gpu = any(interval.allocated for history in histories for interval in history.intervals)
    kind = "memory reserved on the GPU" if gpu else "resident memory"
    held = [tuple(each.held / 2**20 for each in history.intervals) for history in histories]
    most = max(held, key=lambda sizes: max(sizes, default=0.0))
    method = f"highest {kind} over all processes; samples: intervals"
    metrics = [Metric.of(MEMORY_HELD, max(most, default=0.0), most, method)]
    ranks = [history.settled(plan) for history in histories]
    if gpu:
        highest = max(each.resident for history in histories for each in history.intervals) / 2**20
        metrics.append(Metric.of(HOST_MEMORY, highest, method="highest resident memory over all processes"))
        metrics += _growth(RESERVED_GROWTH, ranks, lambda i: i.reserved, kind)
        metrics += _growth(DRIVER_GROWTH, ranks, lambda i: i.driver, "memory in use on the card")
    return [*metrics, *_growth(HOST_GROWTH, ranks, lambda i: i.resident, "resident memory")]


def _growth(
    quantity: Quantity, ranks: Sequence[Sequence[Interval]], size: Callable[[Interval], int], what: str
) -> list[Metric]:
    """Growth of memory on the rank where it is fastest; none with too few checkpoints or processes to see it.

    A level of its own is granted to no process beyond its first checkpoint, so that readings before it are left out.
    What leaks within a process shows in the slope there, and what stays when a process has ended in the next one's
    level; the first process, which loaded no checkpoint, lies lower than all others and is not compared with them.
    """
    metrics, by_hour = ([], quantity is HOST_GROWTH)  # else in percent of the mean by 1,000 steps
    for intervals in ranks:
        used = [each for each in intervals if each.checkpoints]
        processes = np.array([each.process for each in used])
        hours = [(each.end_s - each.seconds / 2) / 3600 for each in used]  # until each interval's middle
        x = np.array(hours if by_hour else [(each.end_step - each.steps / 2) / 1000 for each in used])
        y = np.array([size(each) / 2**20 for each in used])
        unique = np.unique(processes)
        if len(unique) < LEAST_PROCESSES or max(each.checkpoints for each in used) < LEAST_CHECKPOINTS:
            continue
        if (within := common_slope(processes, x, y)) is None:
            continue
        means = np.array([(x[processes == each].mean(), y[processes == each].mean()) for each in unique[1:]])
        between = float(np.polyfit(means[:, 0], means[:, 1], 1)[0])
        slope, where = within, f"within processes; {SLOPE_INTERVAL}"
        if between > within.value:
            slope, where = Slope(between, None, None), "from one process to the next"
        method = f"{what} from each process's first checkpoint on, the faster of two growths: {where}"
        metrics.append(_slope(quantity, slope, 1.0 if by_hour else 100 / y.mean(), method))
    return [max(metrics, key=lambda metric: metric.value)] if metrics else []


def _slope(quantity: Quantity, slope: Slope, scale: float, method: str) -> Metric:
    low, high = (None if end is None else scale * end for end in (slope.low, slope.high))
    return Metric(quantity.name, quantity.unit, scale * slope.value, ci_low=low, ci_high=high, method=method)


def _times(case: Case, report: RankReport, history: SoakHistory) -> list[Metric]:
    """Step time, throughput and its drift, figures of the plan if any, and the loss."""
    assert case.soak is not None
    settled, words = _settled(history, case.soak)
    metrics = speed(case, report, [i.seconds / i.steps for i in settled], words)
    speeds = [case.tokens * each.steps / each.seconds for each in settled]
    middles = [(each.end_s - each.seconds / 2) / 3600 for each in settled]
    slope = common_slope([0] * len(speeds), middles, speeds)
    if slope is not None:  # through all processes
        method = f"throughput in percent of its mean: least squares over {len(speeds)} intervals; {SLOPE_INTERVAL}"
        metrics.append(_slope(THROUGHPUT_DRIFT, slope, 100 / fmean(speeds), method))
    losses = tuple(interval.loss / interval.steps for interval in history.intervals)
    last = losses[-max(1, len(losses) // 10) :]
    method = f"mean of the last {len(last)} intervals; samples: means of all intervals{per_byte(case)}"
    return [*metrics, Metric.of(LOSS, fmean(last), losses, method)]


def compare_ranks(histories: Sequence[SoakHistory], plan: SoakPlan) -> list[Metric]:
    """Comparison of several ranks."""
    rows, words = [], ""
    for history in histories:
        mine, words = _settled(history, plan)
        measured = [i for i in mine if i.compute_ms]
        compute = sum(i.compute_ms for i in measured) / sum(i.steps for i in measured) if measured else None
        looks = sum(i.looks for i in mine)
        busy = sum(i.busy for i in mine) / looks if looks else None
        rows.append((median(1000 * i.seconds / i.steps for i in mine), compute, busy))
    return compared(rows, words, f"all steps, by {words}", f"looks once a second, {words}")


def _settled(history: SoakHistory, plan: SoakPlan) -> tuple[list[Interval], str]:
    """The intervals that count for times, of a short soak the last one; and which they are, in words."""
    words = f"means of intervals of {plan.interval_s:.3g} s, the first {plan.warm_up_s:.3g} s of each process left out"
    return history.settled(plan) or history.intervals[-1:], words
