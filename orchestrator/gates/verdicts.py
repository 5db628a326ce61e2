"""Evaluation of the go/no-go rules on stored measurements.

A rule uses the newest complete run with evidence for it (among the given runs, or all), never reported figures. A run
that is running, cancelled or failed is not complete, and one that measures less of the same series than an older run
(a smoke run beside a sweep) does not displace it.
GO: the rule holds. NO-GO: it does not. UNKNOWN: the evidence is missing or incomplete; unmeasured is never a pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from jobs.axes import MORE, more_columns
from jobs.training_plan import TrainingPlan
from orchestrator.analysis import Fit, scaling_fits, surroundings
from orchestrator.gates.evidence import Run, measured_runs, preferred
from orchestrator.gates.results import RuleVerdict, TargetVerdict
from orchestrator.gates.rules import (
    ExponentRule,
    Gates,
    GatesError,
    MetricRule,
    RatioRule,
    Row,
    Rule,
    StatesRule,
    Target,
    Where,
    load_gates,
)
from orchestrator.records import now
from orchestrator.states import PointState, Result, RunState
from orchestrator.store import Store

__all__ = ["Gates", "GatesError", "RuleVerdict", "TargetVerdict", "evaluate", "load_gates", "save_verdicts"]


@dataclass(frozen=True)
class _Candidate:
    """A value to compare with the bound: its points, its description, and the interval if it is a fit."""

    value: float
    points: list[str]
    what: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class _Found:
    """The evidence of a run for a rule; `lacking`: the reason that it is incomplete."""

    candidates: list[_Candidate]
    lacking: str = ""
    unit: str = "1"


def evaluate(store: Store, gates: Gates, run_ids: Sequence[str] | None = None) -> list[TargetVerdict]:
    """Evaluate every target on the measured runs in `run_ids` (None: all). Raises StoreUnavailable."""
    runs = measured_runs(store, run_ids)
    return [_target(target, runs) for target in gates.targets]


_STORED = ("rule", "title", "result", "reason", "value", "unit", "comparison", "bound", "margin", "evidence")


def save_verdicts(store: Store, run_id: str | None, verdicts: Sequence[TargetVerdict]) -> None:
    """Store an evaluation of one run, or (None) of the whole store; the view v_gate shows the newest one."""
    at = now()
    rows = [
        {
            "evaluated_at": at,
            "run_id": run_id,
            "target": target.name,
            "target_title": target.title,
            "target_result": target.result,
            "position": position,
            **{name: getattr(rule, name) for name in _STORED},
        }
        for target in verdicts
        for position, rule in enumerate(target.rules)
    ]
    store.add_verdicts(rows)


def _target(target: Target, runs: list[Run]) -> TargetVerdict:
    rules = [_judge(rule, target.plan, runs) for rule in target.rules]
    results = {rule.result for rule in rules}
    worst = next(result for result in (Result.NO_GO, Result.UNKNOWN, Result.GO) if result in results)
    return TargetVerdict(target.name, target.title, worst, rules, decision=target.name)


def _judge(rule: Rule, plan: TrainingPlan | None, runs: list[Run]) -> RuleVerdict:
    match rule:
        case StatesRule():
            return _judge_states(rule, runs)
        case ExponentRule():
            return _judge_bounded(rule, plan, runs, lambda run: _exponents(rule, run))
        case MetricRule():
            return _judge_bounded(rule, plan, runs, lambda run: _metrics(rule, run))
        case RatioRule():
            return _judge_bounded(rule, plan, runs, lambda run: _ratios(rule, run))


def _judge_bounded(
    rule: ExponentRule | MetricRule | RatioRule,
    plan: TrainingPlan | None,
    runs: list[Run],
    find: Callable[[Run], _Found],
) -> RuleVerdict:
    """Compare the worst candidate of the newest run that has any with the bound."""
    comparison, bound = _bound(rule, plan)
    unit = rule.unit if isinstance(rule, MetricRule) else "1"
    verdict = RuleVerdict(rule.rule, rule.title, Result.UNKNOWN, "", unit=unit, comparison=comparison, bound=bound)
    complete = ((run, find(run)) for run in preferred(runs, rule.where))
    run, found = next(((run, found) for run, found in complete if found.candidates), (None, _Found([])))
    if run is None:
        begun = next((run for run in runs if run.state is not RunState.DONE and find(run).candidates), None)
        return replace(verdict, reason=_unmeasured(_wanted(rule), begun, rule))
    verdict = replace(verdict, run_id=run.run_id, commit=run.commit)
    if found.unit != unit:
        return replace(verdict, reason=f"measured in {found.unit!r}, the bound is in {unit!r}; correct the rule")
    worst = (max if comparison == "<=" else min)(found.candidates, key=lambda candidate: candidate.value)
    margin = bound - worst.value if comparison == "<=" else worst.value - bound
    lacking = f"{found.lacking}: {rule.measure}" if found.lacking else _undecided(found.candidates, comparison, bound)
    result = Result.NO_GO if margin < 0 else Result.UNKNOWN if lacking else Result.GO
    reason = f"{worst.what}; {run}" + (f"; {lacking}" if lacking else "")
    return replace(verdict, result=result, value=worst.value, margin=margin, reason=reason, evidence=worst.points)


def _unmeasured(wanted: str, begun: Run | None, rule: Rule) -> str:
    """The reason of a rule without a complete run; `begun` is the newest other run with evidence."""
    if begun is None:
        return f"not measured: {wanted}; {rule.measure}"
    ended = sum(PointState(point["state"]).ended for point in begun.points)
    return f"no complete run: {begun} is {begun.state}, {ended} of {len(begun.points)} points ended; {rule.measure}"


def _undecided(candidates: list[_Candidate], comparison: str, bound: float) -> str:
    """The reason that the fits do not decide, an interval across the bound; "" if they do."""
    for low, high in (each.interval for each in candidates if each.interval):
        if high > bound if comparison == "<=" else low < bound:
            return f"the interval {low:.3f} to {high:.3f} reaches past the bound: measure more lengths"
    return ""


def _bound(rule: ExponentRule | MetricRule | RatioRule, plan: TrainingPlan | None) -> tuple[str, float]:
    if rule.at_most is not None:
        return "<=", rule.at_most
    if rule.at_least == "plan":
        assert plan is not None, "validated with the target"
        return ">=", plan.needed
    assert rule.at_least is not None, "validated with the rule"
    return ">=", rule.at_least


def _wanted(rule: ExponentRule | MetricRule | RatioRule) -> str:
    match rule:
        case ExponentRule():
            return f"{rule.metric} at {rule.min_lengths} or more lengths ({rule.where})"
        case MetricRule():
            return f"{rule.metric} ({rule.where})"
        case RatioRule(numerator=above, denominator=below):
            if above.where == below.where:
                return f"{above.metric} with {below.metric} ({rule.where})"
            return f"{above.metric} of {above.where} beside {below.metric} of {below.where} ({rule.where})"


def _exponents(rule: ExponentRule, run: Run) -> _Found:
    rows = run.of(rule.metric, rule.where)
    fits = scaling_fits(pd.DataFrame(rows)) if rows else []
    fits = [fit for fit in fits if len(fit.lengths) >= rule.min_lengths]
    return _Found(
        [
            _Candidate(fit.exponent, list(fit.point_ids), _growth(fit, len(fits)), (fit.ci_low, fit.ci_high))
            for fit in fits
        ]
    )


def _growth(fit: Fit, number: int) -> str:
    series = f"{fit.series['implementation']} {fit.series['pass']}"
    series += "".join(f" [{text}]" for text in surroundings(fit.series))
    return (
        f"{series}: {fit.metric} grows as S^{fit.exponent:.3f} (95 % interval {fit.ci_low:.3f}"
        f" to {fit.ci_high:.3f}, {len(fit.lengths)} lengths {fit.lengths[0]:,} to {fit.lengths[-1]:,})"
        + _more(number, "series")
    )


def _metrics(rule: MetricRule, run: Run) -> _Found:
    rows = run.of(rule.metric, rule.where)
    candidates = []
    for row in rows:
        value = abs(row["value"]) if rule.absolute else row["value"]
        what = f"{row['label']}: {rule.metric} {row['value']:.6g} {row['unit']}" + _more(len(rows), "points")
        candidates.append(_Candidate(value, [row["point_id"]], what))
    unit = rows[0]["unit"] if rows else rule.unit
    return _Found(candidates, _lacking(rule, run, {row["point_id"] for row in rows}, rule.where), unit)


def _ratios(rule: RatioRule, run: Run) -> _Found:
    above, below = rule.numerator, rule.denominator
    under: dict[tuple, list[Row]] = defaultdict(list)
    for row in run.of(below.metric, rule.where, below.where):
        if row["per_sequence"] > 0:
            under[_alike(rule, row)].append(row)
    pairs = [
        (top, bottom) for top in run.of(above.metric, rule.where, above.where) for bottom in under[_alike(rule, top)]
    ]
    candidates = []
    for top, bottom in pairs:
        what = f"{top['label']}: {above.metric} {top['per_sequence']:.4g} against {bottom['per_sequence']:.4g}"
        what += "" if top["point_id"] == bottom["point_id"] else f" of {bottom['label']}"
        points = list(dict.fromkeys([top["point_id"], bottom["point_id"]]))
        ratio = top["per_sequence"] / bottom["per_sequence"]
        candidates.append(_Candidate(ratio, points, what + _more(len(pairs), "pairs")))
    return _Found(candidates, _lacking(rule, run, {top["point_id"] for top, _ in pairs}, rule.where, above.where))


def _alike(rule: RatioRule, row: Row) -> tuple:
    """The values in which both sides of a ratio must agree: the columns `same` and all kind-specific axes."""
    asked = {MORE + name for side in (rule.numerator, rule.denominator) for name in side.where.axes}
    return tuple(row[name] for name in (*rule.same, *(own for own in more_columns(row) if own not in asked)))


def _lacking(rule: MetricRule | RatioRule, run: Run, have: set[str], *filters: Where) -> str:
    """The missing evidence of this run; "" if it is complete."""
    if len(have) < rule.min_points:
        return f"only {len(have)} of at least {rule.min_points} points"
    if not rule.every:
        return ""
    points = [point for point in run.points if all(each.matches(point) for each in filters)]
    # A failed point lacks the value, too; only skipped points, which were never to be measured, are left out.
    without = [p for p in points if p["state"] != PointState.SKIPPED and p["point_id"] not in have]
    if not without:
        return ""
    return f"{len(without)} point(s) lack it, e.g. {without[0]['label']} ({without[0]['state']})"


def _judge_states(rule: StatesRule, runs: list[Run]) -> RuleVerdict:
    verdict = RuleVerdict(rule.rule, rule.title, Result.UNKNOWN, "", unit="points", comparison="<=", bound=0.0)
    run = next(iter(preferred(runs, rule.where)), None)
    if run is None:
        begun = next((run for run in runs if run.lengths(rule.where)), None)
        return replace(verdict, reason=_unmeasured(f"no points ({rule.where})", begun, rule))
    points = [point for point in run.points if rule.where.matches(point)]
    bad = [point for point in points if point["state"] in rule.none_of]
    # Skipped points were not to be measured and do not count; cancelled ones were, so the result stays open.
    due = [point for point in points if point["state"] != PointState.SKIPPED]
    ended = [point for point in due if PointState(point["state"]).ended and point["state"] != PointState.CANCELLED]
    wanted = max(len(due), rule.min_points)
    reason = f"{len(bad)} of {len(points)} points ended {', '.join(rule.none_of)}"
    if bad:
        reason += ": " + "; ".join(f"{point['label']} ({point['state']})" for point in bad[:3])
    elif len(ended) < wanted:
        reason += f"; {len(ended)} of {wanted} were run to their end: {rule.measure}"
    result = Result.NO_GO if bad else Result.UNKNOWN if len(ended) < wanted else Result.GO
    return replace(
        verdict,
        result=result,
        value=float(len(bad)),
        margin=0.0 - len(bad),
        reason=f"{reason}; {run}",
        evidence=[point["point_id"] for point in bad or ended],
        run_id=run.run_id,
        commit=run.commit,
    )


def _more(number: int, what: str) -> str:
    return f", the worst of {number} {what}" if number > 1 else ""
