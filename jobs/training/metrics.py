"""Metrics of a training from the reports of its ranks."""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, median

from jobs.diagnosis.advice import imbalance
from jobs.hardware.energy import Energy
from jobs.hardware.stats import summarize
from jobs.schema import quantities
from jobs.schema.point import Measurement, Metric
from jobs.schema.quantities import ENERGY, ESTIMATE_ERROR, THROUGHPUT, THROUGHPUT_NEEDED, TIME, Better, Quantity, Role
from jobs.training.case import TextCase
from jobs.training.live import CHECKPOINT_FAILURES, HELDOUT_LOSS, LOSS, MFU, RANK_COMPUTE_TIME, SERIES, model_flops
from jobs.training.probe import NEAR
from jobs.training.rank import RankReport
from jobs.training.state import RESUME_WARM_UP, first_steady

HELDOUT_LOSS_BEFORE = Quantity("heldout_loss_before", "nat/byte", "Held-out loss before training")
LATE_LOSS = Quantity("late_loss", "nat/byte", "Held-out loss late in the context", better=Better.LOWER)
FORESIGHT = Quantity("foresight", "nat/byte", "Loss's change by later tokens", better=Better.LOWER)
PLANNED_TIME = Quantity("planned_time", "h", "Time that the plan takes", "planned time", Better.LOWER, Role.HEADLINE)
RANK_UTILIZATION = Quantity(
    "rank_utilization", "%", "Utilisation of the least busy rank", "least busy rank", Better.HIGHER, Role.HEADLINE
)
RANK_IMBALANCE = Quantity("rank_imbalance", "%", "Imbalance of the ranks", "imbalance", Better.LOWER, Role.HEADLINE)
RANK_STEP_TIME = Quantity("rank_step_time", "ms", "Step time by rank", better=Better.LOWER)
CHECKPOINT_WAIT = Quantity("checkpoint_wait", "ms", "Training waits for a checkpoint", better=Better.LOWER)
CHECKPOINT_TIME = Quantity("checkpoint_time", "ms", "Time until a checkpoint is complete", better=Better.LOWER)
CHECKPOINT_SIZE = Quantity("checkpoint_size", "MiB", "Size of a checkpoint", better=Better.LOWER)
RESUMED_STEP = Quantity("resumed_step", "1", "Step that training was last resumed from")
CHECKPOINTS = (CHECKPOINT_WAIT, CHECKPOINT_TIME, CHECKPOINT_SIZE, CHECKPOINT_FAILURES, RESUMED_STEP)
QUANTITIES = (
    *(TIME, THROUGHPUT, ENERGY, LOSS, HELDOUT_LOSS, MFU, PLANNED_TIME, RANK_UTILIZATION, RANK_IMBALANCE),
    *(*quantities.MEMORY, RANK_STEP_TIME, RANK_COMPUTE_TIME, HELDOUT_LOSS_BEFORE, THROUGHPUT_NEEDED, LATE_LOSS),
    *(FORESIGHT, *CHECKPOINTS, ESTIMATE_ERROR, *quantities.AGREEMENT, *quantities.TELEMETRY, *SERIES),
)


def measurement(case: TextCase, reports: Sequence[RankReport]) -> Measurement:
    """Results of a point from its ranks' reports, in the order of the ranks.

    Times and losses are the first rank's, as the ranks wait for each other in every step; memory and the agreement with
    the oracle are those of the worst rank.
    """
    first, worst = reports[0], max(reports, key=lambda report: report.peak.allocated)
    run, steady = first.run, first.run.steady_steps()
    last = max(1, len(run.losses) // 10)
    method = f"mean of the last {last} steps; samples: all steps{per_byte(case)}"
    if case.data.tokenized:
        method += f"; in epoch {first.environment['training']['corpus']['epochs']} of the documents"
    parts = [f"the first {first_steady(len(run.seconds))}"]
    parts += [f"{run.foreign} of other code"] if run.foreign else []
    parts += [f"{RESUME_WARM_UP} after each resume"] if len(run.begun) > 1 else []
    left_out = f"{' and '.join(parts)} left out"
    rows = []
    for report in reports:
        own = report.run.compute_ms
        compute = [own[step] for step in steady if step < len(own) and isfinite(own[step])]
        step_ms = 1000 * median(report.run.seconds[step] for step in steady)
        busy = None if report.utilization is None else fmean(report.utilization.samples)
        rows.append((step_ms, fmean(compute) if compute else None, busy))
    metrics = [
        *speed(case, first, [run.seconds[step] for step in steady], left_out),
        *compared(rows, f"steps, {left_out}", "the steady steps", "steady steps"),
        Metric.of(LOSS, sum(run.losses[-last:]) / last, tuple(run.losses), method),
        *common_metrics(case, reports, worst),
    ]
    return Measurement(tuple(metrics), first.state.route, first.environment, worst.peak.files)


def common_metrics(case: TextCase, reports: Sequence[RankReport], worst: RankReport) -> list[Metric]:
    """Metrics of every training: energy, held-out losses, memory of the worst rank, checkpoints, agreement."""
    run, peak, expected = reports[0].run, worst.peak, case.predicted_bytes()
    heldout = f"mean cross entropy over fixed batches of held-out {'documents' if case.data.tokenized else 'files'}"
    metrics = [
        *energy_per_token([report.energy for report in reports]),
        Metric.of(HELDOUT_LOSS_BEFORE, run.before, method=heldout + per_byte(case)),
        Metric.of(HELDOUT_LOSS, run.after, method=heldout + per_byte(case)),
        *peak.metrics(),
    ]
    if (found := run.probe) is not None:
        method = f"of the last range; samples: positions up to {', '.join(map(str, found.ranges))}{per_byte(case)}"
        metrics.append(Metric.of(LATE_LOSS, found.by_position[-1], found.by_position, method))
        places = ", ".join(map(str, found.cuts))
        method = f"of the {NEAR} positions before the changed tokens; samples: all from position {places} on"
        metrics.append(Metric.of(FORESIGHT, max(map(abs, found.changes)), found.changes, method))
    if expected is not None and not case.compile:
        error = 100 * (expected - peak.allocated) / peak.allocated
        metrics.append(Metric.of(ESTIMATE_ERROR, error, method="(predicted - measured) / measured, of peak_memory"))
    if (history := reports[0].checkpoints) is not None:  # of the last attempt
        costs = (
            (CHECKPOINT_WAIT, history.waits_ms, "the training stands still; one checkpoint a sample"),
            (CHECKPOINT_TIME, history.times_ms, "from its begin until its manifest is written"),
            (CHECKPOINT_SIZE, [size / 2**20 for size in history.sizes], "all files"),
        )
        metrics.append(Metric.of(CHECKPOINT_FAILURES, len(history.failures), method="of the last attempt"))
        metrics += [summarize(quantity, values, method) for quantity, values, method in costs if values]
        if resumes := run.begun[1:]:
            method = f"of {len(resumes)} resumes"
            metrics.append(Metric.of(RESUMED_STEP, resumes[-1], tuple(map(float, resumes)), method))
    agreement = max((report.agreement for report in reports), key=lambda found: found.error / found.bound)
    return [*metrics, *agreement.metrics()]


def speed(case: TextCase, report: RankReport, steady: Sequence[float], left_out: str) -> list[Metric]:
    """Step time and throughput, MFU if the GPU's peak is known, and figures of the plan if any.

    `steady` are times of steps, or means of several in a row [s]; `left_out` says which are not among them.
    """
    method = f"from the end of one step to that of the next, data and optimizer included, {left_out}"
    throughput = summarize(THROUGHPUT, [case.tokens / s for s in steady], method)
    metrics = [summarize(TIME, [1000 * s for s in steady], method), throughput]
    if (flops := model_flops(case, report.gpu)) is not None:
        words = "{:.4g} FLOPs a token; the peak of all GPUs is {:.4g} a second".format(*flops)
        metrics.append(Metric.of(MFU, 100 * throughput.value * flops[0] / flops[1], method=words))
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


def compared(
    ranks: Sequence[tuple[float, float | None, float | None]], of_steps: str, of_compute: str, of_looks: str
) -> list[Metric]:
    """Comparison of several ranks, of each its time of a step, its own compute time [ms] and the mean utilisation of
    its GPU [%], if known, and in words what these are of; samples are one a rank. None of a single rank."""
    if len(ranks) == 1:
        return []
    times = tuple(time for time, _, _ in ranks)
    method = f"median of each rank's {of_steps}; value: the slowest rank's"
    metrics = [Metric.of(RANK_STEP_TIME, max(times), times, method)]
    own = tuple(ms for _, ms, _ in ranks if ms is not None)
    if len(own) == len(ranks) and (share := imbalance(dict(enumerate(own)))) is not None:
        until = "from a step's begin until its last gradients are ready to be summed: waits for no other rank"
        method = f"slowest rank's own compute time over the ranks' mean, less 1; {until}; mean of {of_compute}"
        metrics.append(Metric.of(RANK_COMPUTE_TIME, max(own), own, f"{until}; value: the slowest rank's"))
        metrics.append(Metric.of(RANK_IMBALANCE, share, method=method))
    shares = tuple(busy for _, _, busy in ranks if busy is not None)
    if len(shares) == len(ranks):
        method = f"NVML utilisation of each rank's GPU in {of_looks}, checkpoints left out; value: the least busy's"
        metrics.append(Metric.of(RANK_UTILIZATION, min(shares), shares, method))
    return metrics


def per_byte(case: TextCase) -> str:
    """The end of a loss's method: of what it is."""
    return ", of tokens, divided by the bytes of their text" if case.data.tokenized else ""
