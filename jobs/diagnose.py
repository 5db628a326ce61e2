"""Diagnosis of a training: memory at boot, after the loader, at step 1 and at its end, the routes, the hosts' topology.

A point is a short training like one of `train`, on one rank or several; its file `diagnosis.md` has the warnings, each
with its fix. `nsa diagnose --attach RUN` says the same of a training that runs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from jobs import train
from jobs.diagnosis.advice import Diagnosis, advise, describe
from jobs.diagnosis.rank_state import PHASES
from jobs.schema.point import Beat, Measurement, Metric, reporter
from jobs.schema.quantities import Better, Quantity, Role
from jobs.training.metrics import RANK_IMBALANCE, measurement

WARNINGS = Quantity("warnings", "1", "Warnings of the diagnosis", "warnings", Better.LOWER, Role.HEADLINE)
_SIZES = {"allocated": "Most memory allocated", "reserved": "Memory reserved", "resident": "Resident memory"}
PHASE_MEMORY = {
    (phase, size): Quantity(f"{phase}_{size}", "MiB", f"{title} {words}", better=Better.LOWER)
    for phase, words in PHASES.items()
    for size, title in _SIZES.items()
}
AXES = train.AXES
Case = train.Case
QUANTITIES = (WARNINGS, *PHASE_MEMORY.values(), *train.QUANTITIES)


class Spec(train.TrainingSpec):
    """A short training for each kind of attention, diagnosed."""

    kind: Literal["diagnose"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe

    def case_fields(self) -> Mapping[str, Any]:
        return {"topology": True}


def measure(case: Case, beat: Beat) -> Measurement:
    """Train, and diagnose the training. Raises as jobs.train.trained."""
    reports = train.trained(case, beat)
    result = measurement(case, reports)
    ranks = [report.state for report in reports]
    hosts = {report.topology.host: report.topology for report in reports if report.topology is not None}
    found = Diagnosis(
        ranks,
        list(hosts.values()),
        reports[0].environment["variables"],
        {each.state.rank: each.utilization.value for each in reports if each.utilization is not None},
        next((metric.value for metric in result.metrics if metric.name == RANK_IMBALANCE.name), None),
    )
    advice = advise(found)
    for each in advice:
        reporter(beat).warn(f"{each.what}; {each.fix}")
    metrics = [Metric.of(WARNINGS, len(advice), method="in diagnosis.md, each with its fix")]
    for (phase, size), quantity in PHASE_MEMORY.items():
        sizes = [getattr(rank.memory[phase], size) for rank in ranks if phase in rank.memory]
        if sizes and None not in sizes:
            method = f"{PHASES[phase]}; samples: ranks; value: the highest"
            metrics.append(Metric.of(quantity, max(sizes), tuple(sizes), method))
    files = {**result.files, "diagnosis.md": describe(found, advice)}
    environment = {**result.environment, "hosts": [host.placement() for host in found.hosts]}
    return replace(result, metrics=(*metrics, *result.metrics), files=files, environment=environment)
