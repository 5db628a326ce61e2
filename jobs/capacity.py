"""The longest sequence that a model trains on within a card's memory: as predicted, and as measured.

Each length that is tried is a point: from the longest that is predicted to fit upwards until one runs out of memory, or
downwards until one fits, so that the next longer one is shown to fail. With a plan the longest one is looked for, too,
that trains as fast as the plan needs. A point of each implementation, batch and checkpointing has the conclusion.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from jobs.hardware.stats import summarize
from jobs.measure.call import measure_call
from jobs.measure.clock import synchronize
from jobs.measure.model_pass import ModelPass, PassCase, PresetSpec
from jobs.measure.search import Untried, last_that_fits, outcome
from jobs.schema.axes import Axis
from jobs.schema.point import Beat, Conclusion, EndedPoint, Machine, Measurement, Metric, Point
from jobs.schema.quantities import AGREEMENT, MEMORY, TELEMETRY, THROUGHPUT, THROUGHPUT_NEEDED, Better, Quantity, Role
from jobs.schema.states import PointState
from jobs.schema.training_plan import TrainingPlan
from jobs.specs.fields import Count, Lengths, Unique
from jobs.specs.fit import case_fields, does_not_fit
from nsa_core.memory import predicts

LONGEST = Quantity("longest", "token", "Longest sequence that fits", "longest", Better.HIGHER, Role.HEADLINE)
LONGEST_PREDICTED = Quantity("longest_predicted", "token", "Longest sequence predicted to fit", role=Role.HEADLINE)
LONGEST_IN_PLAN = Quantity(
    "longest_in_plan", "token", "Longest sequence that fits and meets the plan", "longest in plan", Better.HIGHER,
    Role.HEADLINE,
)  # fmt: skip
SHORTEST_FAILED = Quantity("shortest_failed", "token", "Shortest sequence that ran out of memory", role=Role.HEADLINE)
QUANTITIES = (
    *(LONGEST, LONGEST_IN_PLAN, LONGEST_PREDICTED, SHORTEST_FAILED, THROUGHPUT, THROUGHPUT_NEEDED),
    *(*MEMORY, *AGREEMENT, *TELEMETRY),
)
AXES = (Axis("checkpointing", "text", "checkpointing"),)

_STEPS = 3  # timed at the longest length


class Case(PassCase):
    """A few steps at one length."""

    limit_bytes: int  # memory that they may use
    answer: Mapping[str, float] | None = None  # metrics of a conclusion, which is not measured


class Spec(PresetSpec):
    """Implementations x batches x checkpointing, each with the lengths to try."""

    kind: Literal["capacity"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    lengths: Lengths = Field(description="lengths to try; the answer is one of them")
    batches: Annotated[list[Count], Field(min_length=1), Unique] = Field(default=[1])
    checkpointing: Annotated[list[bool], Field(min_length=1), Unique] = Field(
        default=[False, True], description="compute blocks anew in the backward pass, to save memory"
    )
    plan: TrainingPlan | None = Field(default=None, description="a long run, for which slower lengths do not count")

    def points(self, machine: Machine) -> Sequence[Point]:
        """The first trial of each implementation, batch and checkpointing: the longest length predicted to fit."""
        self.refuse_unusable(machine)
        return self.next_points(machine, ())

    def next_points(self, machine: Machine, ended: Sequence[EndedPoint]) -> Sequence[Point]:
        """For each search the next length to try, or its conclusion."""
        tried: dict[tuple[Any, ...], dict[int, EndedPoint]] = defaultdict(dict)
        for each in (each for each in ended if each.point.conclusion is None):
            case = Case.model_validate(each.point.config)
            tried[case.implementation, case.batch, case.model.checkpointing][case.seq_len] = each
        found = []
        for series in product(self.implementations, self.batches, self.checkpointing):
            known = tried[series]
            if all(each.state in (PointState.OK, PointState.OOM) for each in known.values()):
                cases = [self._case(machine, series, length) for length in sorted(self.lengths)]
                found.append(self._next(machine, cases, known))
        return found

    def _case(self, machine: Machine, series: tuple[str, int, bool], seq_len: int) -> Case:
        implementation, batch, checkpointing = series
        gib = self.memory_gib
        limit = machine.memory_bytes if gib is None else min(machine.memory_bytes, int(gib * 2**30))
        place = {"implementation": implementation, "seq_len": seq_len, "batch": batch, "dtype": self.precision}
        model = self.model(implementation, checkpointing=checkpointing)
        return Case(pass_="train", **place, **case_fields(self, machine), model=model, limit_bytes=limit)

    def _next(self, machine: Machine, cases: Sequence[Case], tried: Mapping[int, EndedPoint]) -> Point:
        """The next length to try, also where it is predicted not to fit; skipped where not even the weights do."""
        lengths = [case.seq_len for case in cases]
        estimates = [case.estimate() if predicts(case.implementation) else None for case in cases]
        fit = sum(x is not None and x.total <= case.limit_bytes for x, case in zip(estimates, cases, strict=True))

        def fits(place: int) -> bool:
            return outcome(tried, lengths[place]).state is PointState.OK

        try:
            metrics, warning = self._answer(lengths, last_that_fits(fits, len(lengths), max(fit - 1, 0)), tried)
        except Untried as untried:
            place = lengths.index(untried.size)
            estimate = estimates[place]
            weights = None if estimate is None else estimate.parameters + estimate.optimizer
            return _point(
                cases[place],
                f" S={untried.size}",
                untried.size,
                estimate_bytes=None if estimate is None else estimate.total,
                skip_reason=does_not_fit(weights, self, machine, "raise the limit, or use a smaller preset"),
                answers=frozenset({PointState.OOM}),
            )
        if fit:
            metrics.append(Metric.of(LONGEST_PREDICTED, lengths[fit - 1], method="nsa_core.memory"))
        answered = cases[0].model_copy(update={"answer": {metric.name: metric.value for metric in metrics}})
        return _point(answered, "", None, conclusion=Conclusion(tuple(metrics), warning))

    def _answer(
        self, lengths: Sequence[int], longest: int | None, tried: Mapping[int, EndedPoint]
    ) -> tuple[list[Metric], str | None]:
        """Metrics of a search that is over, and a warning if no length is fast enough for the plan.

        Raises:
            Untried: the plan asks for the speed of another length.
        """
        if longest is None:
            warning = f"lengths: {lengths[0]}: the shortest runs out of memory; give shorter ones"
            return [Metric.of(SHORTEST_FAILED, lengths[0], method="the first of the spec's lengths")], warning
        best = tried[lengths[longest]].metrics
        metrics = [Metric.of(LONGEST, lengths[longest], method="of the spec's lengths, a few steps of training")]
        for quantity in (THROUGHPUT, *MEMORY):
            if quantity.name in best:
                metrics.append(Metric.of(quantity, best[quantity.name], method="at the longest length"))
        if longest + 1 < len(lengths):
            metrics.append(Metric.of(SHORTEST_FAILED, lengths[longest + 1], method="the next of the spec's lengths"))
        if self.plan is None:
            return metrics, None
        needed, rates = self.plan.needed, {}
        metrics.append(Metric.of(THROUGHPUT_NEEDED, needed, method="planned tokens over planned hours"))
        for length in reversed(lengths[: longest + 1]):
            rates[length] = outcome(tried, length).metrics[THROUGHPUT.name]
            if rates[length] >= needed:
                method = f"median of steps: {rates[length]:,.0f} tok/s, of which the plan needs {needed:,.0f}"
                metrics.append(Metric.of(LONGEST_IN_PLAN, length, method=method))
                return metrics, None
        fastest = max(rates, key=lambda length: rates[length])
        return metrics, (
            f"plan: no length that fits trains at the {needed:,.0f} tok/s that it needs; the fastest, S={fastest}, "
            f"at {rates[fastest]:,.0f}"
        )


def _point(case: Case, ending: str, seq_len: int | None, **fields: Any) -> Point:
    kept = "on" if case.model.checkpointing else "off"
    label = f"{case.implementation} batch {case.batch}, checkpointing {kept}{ending}"
    axes = case.axes(seq_len=seq_len, more={"checkpointing": kept})
    return Point(kind="capacity", label=label, case=case, axes=axes, **fields)


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the model, then train a few steps at one length. Raises as measure_call."""
    call, measured = measure_call(case, lambda: ModelPass(case), beat)
    beat("steps")
    rates = []
    for _ in range(_STEPS):
        call.clear()
        start = time.perf_counter()
        call.run()
        synchronize(call.device)
        rates.append(case.tokens / (time.perf_counter() - start))
    return replace(measured, metrics=(summarize(THROUGHPUT, rates, "steps"), *measured.metrics))
