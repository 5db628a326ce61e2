"""The longest sequence that a model trains on within a card's memory: as predicted, and as measured.

Each length that is tried is a point: from the longest that is predicted to fit upwards until one runs out of memory, or
downwards until one fits. With a plan the longest one is looked for, too, that trains as fast as the plan needs. A
further point of each implementation, batch and checkpointing has the conclusion.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from pydantic import Field

from jobs.measure.call import measure_call
from jobs.measure.clock import TimingSpec
from jobs.measure.passes import ImplementationsSpec, ModelPass, PassCase
from jobs.measure.search import Untried, outcome
from jobs.schema.axes import Axis
from jobs.schema.point import Beat, Conclusion, EndedPoint, Machine, Measurement, Metric, Point
from jobs.schema.quantities import (
    AGREEMENT,
    MEMORY,
    TELEMETRY,
    THROUGHPUT,
    THROUGHPUT_NEEDED,
    TIME,
    Better,
    Quantity,
    Role,
)
from jobs.schema.states import PointState
from jobs.schema.training_plan import TrainingPlan
from jobs.specs.fields import Count, Lengths, Several
from jobs.specs.fit import does_not_fit

LONGEST = Quantity("longest", "token", "Longest sequence that fits", "longest", Better.HIGHER, Role.HEADLINE)
LONGEST_PREDICTED = Quantity("longest_predicted", "token", "Longest sequence predicted to fit", role=Role.HEADLINE)
LONGEST_IN_PLAN = replace(
    LONGEST, name="longest_in_plan", title="Longest sequence that fits and meets the plan", short="longest in plan"
)
SHORTEST_FAILED = Quantity("shortest_failed", "token", "Shortest sequence that ran out of memory", role=Role.HEADLINE)
CONCLUSION = (LONGEST, LONGEST_IN_PLAN, LONGEST_PREDICTED, SHORTEST_FAILED, THROUGHPUT, THROUGHPUT_NEEDED)
QUANTITIES = (*CONCLUSION, TIME, *MEMORY, *AGREEMENT, *TELEMETRY)
AXES = (Axis("checkpointing", "text", "checkpointing"),)

_STEPS = TimingSpec(repeats=3, min_s=0, max_s=3600, warmup=1)  # at each length


class Case(PassCase):
    """A few steps at one length."""

    limit_bytes: int  # memory that they may use


class Spec(ImplementationsSpec):
    """Implementations x batches x checkpointing, each with the lengths to try."""

    kind: Literal["capacity"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    lengths: Lengths = Field(description="lengths to try; the answer is one of them")
    batches: Several[Count] = Field(default=[1], description="sequences of a step")
    checkpointing: Several[bool] = Field(
        default=[False, True], description="compute blocks anew in the backward pass, to save memory"
    )
    plan: TrainingPlan | None = Field(default=None, description="a long run, for which slower lengths do not count")

    def points(self, machine: Machine) -> Sequence[Point]:
        """The first trial of each implementation, batch and checkpointing: the longest length predicted to fit."""
        self.refuse_unusable(machine)
        return self.next_points(machine, ())

    def next_points(self, machine: Machine, ended: Sequence[EndedPoint]) -> Sequence[Point]:
        """For each search the next length to try, or its conclusion; none where a length neither fits nor runs out."""
        tried: dict[tuple[Any, ...], dict[int, EndedPoint]] = defaultdict(dict)
        for each in ended:
            if each.point.conclusion is None:
                case = Case.model_validate(each.point.config)
                tried[case.implementation, case.batch, case.model.checkpointing][case.seq_len] = each
        return [
            self._next(machine, *series, tried[series])
            for series in product(self.implementations, self.batches, self.checkpointing)
            if all(each.state in (PointState.OK, PointState.OOM) for each in tried[series].values())
        ]

    def _next(
        self, machine: Machine, implementation: str, batch: int, checkpointing: bool, tried: Mapping[int, EndedPoint]
    ) -> Point:
        """The next length to try, also where it is predicted not to fit; skipped where not even the weights do."""
        lengths, limit = sorted(self.lengths), machine.memory_bytes
        if self.memory_gib is not None:
            limit = min(limit, int(self.memory_gib * 2**30))
        model = replace(self.base.under(implementation), checkpointing=checkpointing)
        place = implementation, "train", lengths[0], batch
        shortest = Case.of(self, machine, place, dtype=self.precision, model=model, limit_bytes=limit, timing=_STEPS)
        cases = [shortest.model_copy(update={"seq_len": length}) for length in lengths]
        estimates = [case.estimate() for case in cases]
        fit = sum(estimate is not None and estimate.total <= limit for estimate in estimates)
        kept = "on" if checkpointing else "off"
        label, more = f"{implementation} batch {batch}, checkpointing {kept}", {"checkpointing": kept}
        try:
            metrics, warning = self._answer(lengths, max(fit - 1, 0), tried)
        except Untried as untried:
            place = lengths.index(*untried.args)
            case, estimate = cases[place], estimates[place]
            total = None if estimate is None else estimate.total
            weights = None if estimate is None else estimate.parameters + estimate.optimizer
            skip = does_not_fit(weights, self, machine, "raise the limit, or use a smaller model")
            answers = frozenset({PointState.OOM})
            return Point(
                self.kind, f"{label} S={case.seq_len}", case, case.axes(more=more), total, skip, answers=answers
            )
        if fit:
            metrics.append(Metric.of(LONGEST_PREDICTED, lengths[fit - 1], method="nsa_core.memory"))
        axes, conclusion = shortest.axes(seq_len=None, more=more), Conclusion(tuple(metrics), warning)
        return Point(self.kind, label, shortest, axes, conclusion=conclusion)

    def _answer(
        self, lengths: Sequence[int], guess: int, tried: Mapping[int, EndedPoint]
    ) -> tuple[list[Metric], str | None]:
        """Metrics of a search that is over, and a warning if no length fits, or is fast enough for the plan.

        `guess` is the place of the first length to try. Raises Untried for the next one.
        """
        longest = guess
        if outcome(tried, lengths[guess]).state is PointState.OK:
            while lengths[longest + 1 :] and outcome(tried, lengths[longest + 1]).state is PointState.OK:
                longest += 1
        else:
            while longest >= 0 and outcome(tried, lengths[longest]).state is not PointState.OK:
                longest -= 1
        if longest < 0:
            warning = f"lengths: {lengths[0]}: the shortest runs out of memory; give shorter ones"
            return [Metric.of(SHORTEST_FAILED, lengths[0], method="the first of the spec's lengths")], warning
        metrics = [Metric.of(LONGEST, lengths[longest], method="of the spec's lengths, a few steps of training")]
        for quantity in (THROUGHPUT, *MEMORY):
            if (value := tried[lengths[longest]].metrics.get(quantity.name)) is not None:
                metrics.append(Metric.of(quantity, value, method="at the longest length"))
        if lengths[longest + 1 :]:
            metrics.append(Metric.of(SHORTEST_FAILED, lengths[longest + 1], method="the next of the spec's lengths"))
        if self.plan is None:
            return metrics, None
        needed, rates = self.plan.needed, {}
        metrics.append(Metric.of(THROUGHPUT_NEEDED, needed, method="planned tokens over planned hours"))
        for length in reversed(lengths[: longest + 1]):
            rates[length] = outcome(tried, length).metrics[THROUGHPUT.name]
            if rates[length] >= needed:
                method = f"median of steps: {rates[length]:,.0f} tok/s, of which the plan needs {needed:,.0f}"
                return [*metrics, Metric.of(LONGEST_IN_PLAN, length, method=method)], None
        fastest = max(rates, key=lambda length: rates[length])
        return metrics, (
            f"plan: no length that fits trains at the {needed:,.0f} tok/s that it needs; the fastest, S={fastest}, "
            f"at {rates[fastest]:,.0f}"
        )


def measure(case: Case, beat: Beat) -> Measurement:
    """Check the model, then train a few steps at one length. Raises as measure_call."""
    return measure_call(case, lambda: ModelPass(case), beat)[1]
