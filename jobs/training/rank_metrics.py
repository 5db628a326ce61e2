"""Comparison of a training's ranks: while it runs, from their samples, and at its end, from their reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from jobs.diagnosis.advice import imbalance
from jobs.process.messages import Samples
from jobs.schema.point import Metric, Reporter
from jobs.schema.quantities import Better, Quantity, Role
from jobs.training.loop import RANK_COMPUTE_TIME
from jobs.training.report import RankReport

RANK_UTILIZATION = Quantity(
    "rank_utilization", "%", "Utilisation of the least busy rank", "least busy rank", Better.HIGHER, Role.HEADLINE
)
RANK_IMBALANCE = Quantity("rank_imbalance", "%", "Imbalance of the ranks", "imbalance", Better.LOWER, Role.HEADLINE)
RANK_STEP_TIME = Quantity("rank_step_time", "ms", "Step time by rank", better=Better.LOWER)

_RECENT = 20  # samples of a rank: ten seconds, or as many steps where those take longer


class LiveImbalance:
    """Reports the imbalance of the ranks, from their latest own compute times.

    Medians, because a rank's first step compiles, and the one after a checkpoint waits: by chance one rank's longer.

    Args:
        ranks: their number; of one, and of ranks that tell no own compute time, nothing is reported.
    """

    def __init__(self, ranks: int, report: Reporter) -> None:
        self._ranks = ranks
        self._report = report
        self._times: dict[int, deque[float]] = {}  # by rank [ms]
        self._steps: dict[int, int] = {}  # that the ranks have got to
        self._told = 0

    def take(self, sample: Samples) -> None:
        """Take in a sample; reports once all ranks have got to another step."""
        if (ms := sample.values.get(RANK_COMPUTE_TIME.name)) is None:
            return
        self._times.setdefault(sample.rank, deque(maxlen=_RECENT)).append(ms)
        self._steps[sample.rank] = sample.step
        step = min(self._steps.values())
        if len(self._steps) < self._ranks or step <= self._told:
            return
        self._told = step
        if (share := imbalance({rank: median(times) for rank, times in self._times.items()})) is not None:
            self._report.sample(step, {RANK_IMBALANCE.name: share})


def compared(
    reports: Sequence[RankReport],
    steps: tuple[Sequence[float], str],
    compute: tuple[Sequence[float | None], str],
    busy: tuple[Sequence[float | None], str],
) -> list[Metric]:
    """Comparison of several ranks; samples are one a rank. None of a single rank.

    Args:
        steps: each rank's time of a step [ms], and what it is, in words.
        compute: each rank's own compute time of a step [ms], None if unknown, and what it is a mean of.
        busy: the mean utilisation of each rank's GPU [%], None if unknown, and the steps that it is of.
    """
    if len(reports) == 1:
        return []
    times, each = steps
    metrics = [Metric.of(RANK_STEP_TIME, max(times), tuple(times), f"{each}; value: the slowest rank's")]
    own = {rank: ms for rank, ms in enumerate(compute[0]) if ms is not None}
    if len(own) == len(reports):
        metrics += _imbalance(own, compute[1])
    shares = tuple(share for share in busy[0] if share is not None)
    if len(shares) == len(reports):
        method = f"NVML utilisation of each rank's GPU in {busy[1]}, checkpoints left out; value: the least busy's"
        metrics.append(Metric.of(RANK_UTILIZATION, min(shares), shares, method))
    return metrics


def _imbalance(compute: dict[int, float], over: str) -> list[Metric]:
    """Compute time and imbalance from each rank's own compute time of a step [ms]."""
    until = "from a step's begin until its last gradients are ready to be summed: waits for no other rank"
    method = f"slowest rank's own compute time over the ranks' mean, less 1; {until}; mean of {over}"
    share, samples = imbalance(compute), tuple(compute.values())
    assert share is not None
    return [
        Metric.of(RANK_COMPUTE_TIME, max(samples), samples, f"{until}; value: the slowest rank's"),
        Metric.of(RANK_IMBALANCE, share, method=method),
    ]
