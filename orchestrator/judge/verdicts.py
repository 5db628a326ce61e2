"""Evaluation of the go/no-go rules on stored measurements.

A rule uses the newest complete run with evidence for it (among the given runs, or all), never reported figures. A run
that is running, cancelled or failed is not complete, unless it was resumed and each of its points has an outcome, which
counts while the point is measured again. One that measures less of the same series than an older run (a smoke run
beside a sweep) does not displace it; where it violates the rule, the rule is UNKNOWN. A newer one that has no evidence
because points of the same series failed leaves the rule UNKNOWN, too. On a hardware only points measured on it count;
where there are none, and the rule transfers, those of another card of the same architecture.
GO: the rule holds. NO-GO: it does not. UNKNOWN: the evidence is missing or incomplete; unmeasured is never a pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product, takewhile

from sqlalchemy import insert

from jobs.schema.quantities import readable
from jobs.schema.states import FAILED, Result
from orchestrator.judge.candidates import Found, find, requirement
from orchestrator.judge.crossover import Crossing, crossings
from orchestrator.judge.evidence import Run, measured_runs, preferred, series_of
from orchestrator.judge.rules import QUESTIONS, Gates, MetricRule, Plan, RatioRule, Rule, StatesRule, Target
from orchestrator.judge.scope import Hardware, Row, Scope
from orchestrator.judge.steps import Durations, Step, durations, step_of
from orchestrator.store import Store
from orchestrator.store.models import Verdict
from orchestrator.store.records import now

_STORED = ("rule", "title", "result", "reason", "value", "unit", "comparison", "bound", "margin", "evidence")


@dataclass(frozen=True)
class RuleVerdict:
    """The verdict on one rule."""

    rule: str
    title: str
    result: Result
    reason: str  # the evidence in words, or the missing evidence and how to measure it
    value: float | None = None  # the worst value found; None if nothing was measured
    unit: str = "1"
    comparison: str | None = None  # "<=" or ">="
    bound: float | None = None
    margin: float | None = None  # distance of the value to the bound, in the unit; negative if the bound is violated
    evidence: list[str] = field(default_factory=list)  # ids of the points behind the value
    run_id: str | None = None  # the run that the verdict rests on, and its commit if it is known
    commit: str | None = None
    transferred: str | None = None  # name of the other card that the evidence is of; None: of this one
    step: Step | None = None  # the measurement that would settle it; None unless it is UNKNOWN
    headline: bool = False  # whether its figure belongs into a sentence about the target
    question: str | None = None  # the one of QUESTIONS that it answers; None where the target asks none
    says: str | None = None  # the figure in words, for a sentence
    query: str | None = None  # SQL that gives `value` from the views; None for a fit

    @property
    def limit(self) -> str:
        """The bound in words: "<= 1.15"."""
        return "" if self.bound is None else f"{self.comparison} {readable(self.bound, self.unit)}"


@dataclass(frozen=True)
class TargetVerdict:
    """The verdict on a target: NO-GO if a rule fails, else UNKNOWN if one lacks evidence, else GO."""

    name: str  # the decision's name, with "/" and the hardware's where it has hardware
    title: str
    result: Result
    rules: list[RuleVerdict]
    decision: str  # the name of the target in YAML
    hardware: Hardware | None = None  # the machine it is about; None: any
    plan: Plan | None = None
    crossing: Crossing | None = None  # where NSA begins to pay there, in the first of its workloads with evidence

    @property
    def questions(self) -> dict[str, Result]:
        """The answer to each question that a rule is about."""
        asked = {each: [rule.result for rule in self.rules if rule.question == each] for each in QUESTIONS}
        return {question: worst(results) for question, results in asked.items() if results}

    @property
    def commits(self) -> list[str]:
        """The commits that the rules rest on, in the order of the rules; more than one is worth a warning."""
        return list(dict.fromkeys(rule.commit for rule in self.rules if rule.commit))

    @property
    def measured(self) -> bool:
        """Whether a rule has evidence of this very hardware."""
        return any(rule.value is not None and rule.transferred is None for rule in self.rules)

    @property
    def judged(self) -> bool:
        """Whether a rule has any evidence, be it of another card."""
        return any(rule.value is not None for rule in self.rules)


def worst(results: Iterable[Result]) -> Result:
    """NO-GO if one is, else UNKNOWN if one is, else GO."""
    found = set(results)
    return next(result for result in (Result.NO_GO, Result.UNKNOWN, Result.GO) if result in found)


def evaluate(store: Store, gates: Gates, run_ids: Sequence[str] | None = None) -> list[TargetVerdict]:
    """Evaluate every target on the measured runs in `run_ids` (None: all), on each of its hardware. Raises
    StoreUnavailable."""
    return judge(measured_runs(store, run_ids), gates)


def judge(runs: list[Run], gates: Gates) -> list[TargetVerdict]:
    """The verdicts by these runs, newest first."""
    known, crossed = durations(runs), crossings(runs, gates)
    return [
        _target(target, hardware, gates.hardware, runs, known, crossed)
        for target in gates.targets
        for hardware in gates.of(target)
    ]


def save_verdicts(store: Store, run_id: str | None, verdicts: Sequence[TargetVerdict]) -> None:
    """Store an evaluation of one run, or (None) of the whole store; the view v_gate shows the newest one."""
    at = now()
    rows = []
    for target in verdicts:
        title = target.title + (f" (on {target.hardware.title})" if target.hardware else "")
        about = {"target": target.name, "target_title": title, "target_result": target.result}
        for position, rule in enumerate(target.rules):
            judged = {name: getattr(rule, name) for name in _STORED}
            rows.append({"evaluated_at": at, "run_id": run_id, "position": position, **about, **judged})
    if rows:
        with store.session(writes=True) as session:
            session.execute(insert(Verdict), rows)


def _target(
    target: Target,
    hardware: Hardware | None,
    machines: Sequence[Hardware],
    runs: list[Run],
    known: Durations,
    crossed: list[Crossing],
) -> TargetVerdict:
    rules = []
    for rule in target.rules_on(hardware):
        step = step_of(rule, hardware, known)
        how = f"run `{step.command}`" if step.command else step.lacking
        case, scope = _Case(rule, target.plan, runs, how), Scope(rule.where, hardware, whole=rule.gpus == "all")
        verdict = _judge(case, scope)
        if verdict.value is None:
            verdict = _transferred(case, scope, machines) or verdict
        says = None
        if rule.says and verdict.value:
            says = rule.says.format(value=verdict.value, inverse=1 / verdict.value, bound=verdict.bound)
        open_step = step if verdict.result is Result.UNKNOWN else None
        rules.append(replace(verdict, step=open_step, headline=rule.headline, question=rule.question, says=says))
    here = {each.name: each for each in crossed if hardware and each.hardware.gpu == hardware.gpu}
    return TargetVerdict(
        f"{target.name}/{hardware.name}" if hardware else target.name,
        target.title,
        worst(rule.result for rule in rules),
        rules,
        target.name,
        hardware,
        target.plan,
        next((here[name] for name in target.crossovers if name in here), None),
    )


@dataclass(frozen=True)
class _Case:
    """A rule to judge by the runs."""

    rule: Rule
    plan: Plan | None
    runs: list[Run]
    how: str  # the way to missing evidence, in words

    def unmeasured(self, missing: str, begun: Run | None) -> str:
        """The reason without a complete run; `begun` is the newest other run with evidence."""
        if begun is None:
            return f"not measured: {missing}; {self.how}"
        ended, points = sum(n for state, n in begun.states.items() if state.ended), sum(begun.states.values())
        return f"no complete run: {begun} is {begun.state}, {ended} of {points} points ended; {self.how}"

    def preferred(self, scope: Scope) -> list[Run]:
        """The complete runs as their evidence counts; after all others those with fewer points than the rule needs."""
        least = getattr(self.rule, "min_points", 1)
        return sorted(preferred(self.runs, scope), key=lambda run: sum(run.lengths(scope).values()) < least)

    def doubts(self, run: Run, points: Sequence[str], scope: Scope) -> str:
        """Why the evidence is doubtful, in words; evidence for a plan is examined."""
        rule, timed = self.rule, None
        if not (self.plan and self.plan.seq_len):
            return ""
        if isinstance(rule, RatioRule | MetricRule) and rule.question in ("feasible", "worth it"):
            timed = rule.numerator.metric if isinstance(rule, RatioRule) else rule.metric
        found = run.doubts(points, scope.hardware, timed)
        return f"doubtful: {', '.join(found)}: {self.how}" if found else ""


def _transferred(case: _Case, own: Scope, machines: Sequence[Hardware]) -> RuleVerdict | None:
    """The verdict by lesser evidence: of other points on this card, then of another card of its architecture."""
    rule, here = case.rule, own.hardware
    others = []
    if rule.transfers and here is not None and None not in (here.gpu, here.architecture):
        alike = (each for each in machines if each.architecture == here.architecture)
        others = [each.model_copy(update={"gpus": here.gpus}) for each in alike if each.gpu not in (None, here.gpu)]
    filters = [("", rule.where), *((each.what, each.where) for each in rule.instead)]
    for card, (what, where) in product([here, *others], filters):
        scope = own
        if card is not here or what:
            scope = Scope(where, card, own.whole)
            verdict = _judge(case, scope)
            if verdict.value is not None:
                gpu = next((run.gpu for run in case.runs if run.run_id == verdict.run_id and card is not here), None)
                lesser = ", ".join(filter(None, (gpu, what)))
                return replace(verdict, transferred=lesser, reason=f"transferred from {lesser}: {verdict.reason}")
        unlike = {run.shape: run for run in preferred(case.runs, scope)}.values()
        if card is here and any(run.failed(scope) for run in unlike):
            return None  # what fails on this card is not passed over for what ran on another
    return None


def _judge(case: _Case, scope: Scope) -> RuleVerdict:
    """Compare the worst candidate of the newest run that has any with the bound; doubtful evidence makes no GO."""
    rule = case.rule
    unit = rule.unit if isinstance(rule, MetricRule) else "points" if isinstance(rule, StatesRule) else "1"
    comparison, bound = ("<=", 0.0) if isinstance(rule, StatesRule) else rule.bound_for(case.plan)
    sign = 1 if comparison == "<=" else -1  # the greater a value times this, the worse
    verdict = RuleVerdict(rule.rule, rule.title, Result.UNKNOWN, "", unit=unit, comparison=comparison, bound=bound)
    run, found, failed = _newest(case, scope)
    if failed is not None:  # a success before it says nothing about what fails now
        point, where = failed
        return replace(verdict, reason=f"not measured: {point['label']} ended {point['state']} in {where}; {case.how}")
    if run is None:
        others = (run for run in case.runs if not run.complete)
        begun = next((run for run in others if find(rule, run, scope).candidates), None)
        return replace(verdict, reason=case.unmeasured(requirement(rule, scope), begun))
    verdict = replace(verdict, run_id=run.run_id, commit=run.commit)
    if found.refused and not found.candidates:
        return replace(verdict, reason=f"not comparable: {found.refused}; {run}; {case.how}")
    if found.unit != unit:
        return replace(verdict, reason=f"measured in {found.unit!r}, the bound is in {unit!r}; correct the rule")

    furthest = max(found.candidates, key=lambda candidate: sign * candidate.value)
    margin = bound - furthest.value if comparison == "<=" else furthest.value - bound
    lacking = [f"{found.lacking}: {case.how}"] if found.lacking else []
    for low, high in (each.interval for each in found.candidates if each.interval and not found.lacking):
        if high > bound if comparison == "<=" else low < bound:
            lacking.append(f"the interval {low:.3f} to {high:.3f} reaches past the bound: measure more lengths")
            break
    if doubts := case.doubts(run, furthest.points, scope):
        lacking.append(doubts)
    # A newer run that measured less does not displace this one, but it is not passed over if it violates the bound.
    newer = takewhile(lambda each: each.run_id != run.run_id, case.runs)
    beyond = (
        f"but the newer {each}, which measured less, shows {candidate.what}: {case.how}"
        for each in newer
        if each.complete
        for candidate in find(rule, each, scope).candidates
        if sign * candidate.value > sign * bound
    )
    lacking += islice(beyond, 1)
    if margin < 0 and isinstance(rule, MetricRule) and rule.proof:
        proven = {row["point_id"] for row in run.of(rule.proof, scope)}
        if proven.isdisjoint(furthest.points):
            margin, lacking = None, [f"no {rule.proof} there, so that more was not tried: {case.how}"]
    return replace(
        verdict,
        result=Result.NO_GO if margin is not None and margin < 0 else Result.UNKNOWN if lacking else Result.GO,
        reason="; ".join([furthest.what, str(run), *lacking]),
        value=furthest.value,
        margin=margin,
        evidence=furthest.points,
        query=furthest.query,
    )


def _newest(case: _Case, scope: Scope) -> tuple[Run | None, Found, tuple[Row, Run] | None]:
    """The newest complete run with evidence, be it comparable or not; the evidence; and the point that failed, of the
    same series, in a newer run without evidence."""
    rule = case.rule
    sides = (rule.numerator.where, rule.denominator.where) if isinstance(rule, RatioRule) else (rule.where,)
    for run in case.preferred(scope):
        found = find(rule, run, scope)
        if found.candidates or found.refused:
            newer = (each for each in case.runs[: case.runs.index(run)] if each.complete and each.failed(scope))
            without = (each for each in newer if not find(rule, each, scope).candidates)
            for other, side in product(without, sides):
                for point in other.in_scope(scope, side):
                    if point["state"] in FAILED and series_of(point) in run.lengths(scope):
                        return run, found, (point, other)
            return run, found, None
    return None, Found([]), None
