"""Metrics of a training from the reports of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, median
from typing import Any

from jobs.diagnosis.advice import imbalance
from jobs.hardware.energy import Energy
from jobs.hardware.stats import summarize
from jobs.schema.point import Measurement, Metric
from jobs.schema.quantities import (
    AGREEMENT,
    ENERGY,
    ESTIMATE_ERROR,
    MEMORY,
    TELEMETRY,
    THROUGHPUT,
    THROUGHPUT_NEEDED,
    TIME,
    Better,
    Quantity,
    Role,
)
from jobs.training.case import TextCase
from jobs.training.checkpoints.report import (
    CHECKPOINT_FAILURES,
    CHECKPOINT_SIZE,
    CHECKPOINT_TIME,
    CHECKPOINT_WAIT,
    CHECKPOINTS,
    RESUMED_STEP,
)
from jobs.training.live import HELDOUT_LOSS, LOSS, MFU, RANK_COMPUTE_TIME, SERIES, ModelFlops
from jobs.training.report import RankReport
from jobs.training.state import RESUME_WARM_UP, Run, first_steady, steady_steps

HELDOUT_LOSS_BEFORE = Quantity("heldout_loss_before", "nat/byte", "Held-out loss before training")
PLANNED_TIME = Quantity("planned_time", "h", "Time that the plan takes", "planned time", Better.LOWER, Role.HEADLINE)
RANK_UTILIZATION = Quantity(
    "rank_utilization", "%", "Utilisation of the least busy rank", "least busy rank", Better.HIGHER, Role.HEADLINE
)
RANK_IMBALANCE = Quantity("rank_imbalance", "%", "Imbalance of the ranks", "imbalance", Better.LOWER, Role.HEADLINE)
RANK_STEP_TIME = Quantity("rank_step_time", "ms", "Step time by rank", better=Better.LOWER)
QUANTITIES = (
    *(TIME, THROUGHPUT, ENERGY, LOSS, HELDOUT_LOSS, MFU, PLANNED_TIME, RANK_UTILIZATION, RANK_IMBALANCE, *MEMORY),
    *(RANK_STEP_TIME, RANK_COMPUTE_TIME),
    *(HELDOUT_LOSS_BEFORE, THROUGHPUT_NEEDED, *CHECKPOINTS, ESTIMATE_ERROR, *AGREEMENT, *TELEMETRY),
    *SERIES,
)


def measurement(case: TextCase, reports: Sequence[RankReport]) -> Measurement:
    """Results of a point from its ranks' reports, in the order of the ranks.

    Times and losses are the first rank's, as the ranks wait for each other in every step; memory and the agreement with
    the oracle are those of the worst rank.
    """
    first = reports[0]
    worst = max(reports, key=lambda report: report.peak.allocated)
    agreement = max((report.agreement for report in reports), key=lambda found: found.error / found.bound)
    steady = [first.run.seconds[step] for step in steady_steps(first.run)]
    metrics = [*speed(case, first, steady, _left_out(first.run)), *energy_per_token([r.energy for r in reports])]
    metrics += _ranks(reports)
    metrics += [*_quality(case, first), *memory(case, worst), *checkpoint_costs(first), *agreement.metrics()]
    environment = {**first.environment, "training": first.environment["training"] | history(first)}
    return Measurement(tuple(metrics), first.route, environment, worst.peak.files)


def speed(case: TextCase, report: RankReport, steady: Sequence[float], left_out: str) -> list[Metric]:
    """Step time and throughput, MFU if the GPU's peak is known, and figures of the plan if any.

    Args:
        steady: times of steps, or means of several in a row [s].
        left_out: the steps that are not among them, in words.
    """
    method = f"from the end of one step to that of the next, data and optimizer included, {left_out}"
    throughput = summarize(THROUGHPUT, [case.tokens / s for s in steady], method)
    metrics = [summarize(TIME, [1000 * s for s in steady], method), throughput]
    if (flops := ModelFlops.of(case, report.gpu)) is not None:
        metrics.append(Metric.of(MFU, flops.utilization(throughput.value), method=flops.method))
    if (plan := case.plan) is not None:
        work = f"{plan.steps} steps x {plan.tokens_per_step} tokens"
        hours = plan.hours_at(throughput.value)
        metrics.append(Metric.of(PLANNED_TIME, hours, method=f"{work} at the measured throughput"))
        metrics.append(Metric.of(THROUGHPUT_NEEDED, plan.needed, method=f"{work} in {plan.hours:g} h"))
    return metrics


def energy_per_token(energies: Sequence[Energy | None]) -> list[Metric]:
    """Energy of all ranks' GPUs for a token; none if one of them tells none."""
    told = [energy for energy in energies if energy is not None]
    if not told or len(told) < len(energies):
        return []
    seconds = told[0].seconds
    method = f"NVML's energy counter of all ranks' cards over {seconds:.3g} s of steady steps, of this attempt"
    shares = tuple(energy.joules / energy.work for energy in told)
    return [Metric.of(ENERGY, sum(shares), shares, f"{method}; samples: ranks")]


def _ranks(reports: Sequence[RankReport]) -> list[Metric]:
    """Comparison of several ranks."""
    run = reports[0].run
    chosen = steady_steps(run)
    steps = [1000 * median(report.run.seconds[step] for step in chosen) for report in reports]
    compute: list[float | None] = []
    for ms in (report.run.compute_ms for report in reports):
        own = [ms[step] for step in chosen if step < len(ms) and isfinite(ms[step])]
        compute.append(fmean(own) if own else None)
    each = f"median of each rank's steps, {_left_out(run)}"
    busy = [None if (sampled := report.utilization) is None else fmean(sampled.samples) for report in reports]
    return compared((steps, each), (compute, "the steady steps"), (busy, "steady steps"))


def compared(
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
    times, each = steps
    if len(times) == 1:
        return []
    metrics = [Metric.of(RANK_STEP_TIME, max(times), tuple(times), f"{each}; value: the slowest rank's")]
    own = tuple(ms for ms in compute[0] if ms is not None)
    if len(own) == len(times):
        until = "from a step's begin until its last gradients are ready to be summed: waits for no other rank"
        share = imbalance(dict(enumerate(own)))
        assert share is not None
        method = f"slowest rank's own compute time over the ranks' mean, less 1; {until}; mean of {compute[1]}"
        metrics += [
            Metric.of(RANK_COMPUTE_TIME, max(own), own, f"{until}; value: the slowest rank's"),
            Metric.of(RANK_IMBALANCE, share, method=method),
        ]
    shares = tuple(share for share in busy[0] if share is not None)
    if len(shares) == len(times):
        method = f"NVML utilisation of each rank's GPU in {busy[1]}, checkpoints left out; value: the least busy's"
        metrics.append(Metric.of(RANK_UTILIZATION, min(shares), shares, method))
    return metrics


def _left_out(run: Run) -> str:
    """The steps that count neither for times nor for throughput, in words."""
    parts = [f"the first {first_steady(len(run.seconds))}"]
    parts += [f"{run.foreign} of other code"] if run.foreign else []
    parts += [f"{RESUME_WARM_UP} after each resume"] if len(run.begun) > 1 else []
    return f"{' and '.join(parts)} left out"


def checkpoint_costs(report: RankReport) -> list[Metric]:
    """Costs of the checkpoints that the last attempt saved, its failures, and the step that it went on from."""
    if (history := report.checkpoints) is None:
        return []
    metrics = [Metric.of(CHECKPOINT_FAILURES, len(history.failures), method="of the last attempt")]
    for quantity, values, method in (
        (CHECKPOINT_WAIT, history.waits_ms, "the training stands still; one checkpoint a sample"),
        (CHECKPOINT_TIME, history.times_ms, "from its begin until its manifest is written"),
        (CHECKPOINT_SIZE, [size / 2**20 for size in history.sizes], "all files"),
    ):
        metrics += [summarize(quantity, values, method)] if values else []
    if len(report.run.begun) > 1:
        method = f"of {len(report.run.begun) - 1} resumes"
        metrics.append(Metric.of(RESUMED_STEP, report.run.begun[-1], tuple(map(float, report.run.begun[1:])), method))
    return metrics


def history(report: RankReport) -> dict[str, Any]:
    """The training's checkpoints and resumes, as part of the point's environment."""
    if (history := report.checkpoints) is None:
        return {}
    found = {"folder": history.folder, "kept": history.kept, "failures": history.failures, "damaged": history.damaged}
    return {"checkpoints": found, "resumed_from": report.run.begun[1:], "steps_of_other_code": report.run.foreign}


def _quality(case: TextCase, report: RankReport) -> list[Metric]:
    """Losses; those of tokens are sums over the tokens, divided by the bytes of their text."""
    run = report.run
    last = max(1, len(run.losses) // 10)
    ending = sum(run.losses[-last:]) / last
    method = f"mean of the last {last} steps; samples: all steps{per_byte(case)}"
    if case.data.tokenized:
        method += f"; in epoch {report.environment['training']['corpus']['epochs']} of the documents"
    return [Metric.of(LOSS, ending, tuple(run.losses), method=method), *heldout_losses(case, run)]


def per_byte(case: TextCase) -> str:
    """The end of a loss's method: of what it is."""
    return ", of tokens, divided by the bytes of their text" if case.data.tokenized else ""


def heldout_losses(case: TextCase, run: Run) -> list[Metric]:
    """Held-out loss before and after the training."""
    texts = "documents" if case.data.tokenized else "files"
    heldout = f"mean cross entropy over fixed batches of held-out {texts}{per_byte(case)}"
    return [
        Metric.of(HELDOUT_LOSS_BEFORE, run.before, method=heldout),
        Metric.of(HELDOUT_LOSS, run.after, method=heldout),
    ]


def memory(case: TextCase, report: RankReport) -> list[Metric]:
    """Peak memory of one whole step, and the error of the estimate."""
    peak, expected = report.peak, case.estimate()
    if expected is None:
        return peak.metrics()
    error = 100 * (expected - peak.allocated) / peak.allocated
    method = "(predicted - measured) / measured, of peak_memory"
    return [*peak.metrics(), Metric.of(ESTIMATE_ERROR, error, method=method)]
