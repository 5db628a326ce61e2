"""A user's rules, held against the quantities that the kinds declare: a rule that cannot fail decides nothing."""

import fnmatch
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from jobs.schema.axes import RESULTS_NAME
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import Better, Quantities
from jobs.specs.kinds import kinds, offered_kinds
from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError
from orchestrator.judge.rules import READY_SPECS, Gates, GatesError, Rule, Target, load_gates

_LARGEST, _STEEPEST = 1e9, 10.0  # no value of a quantity, in its unit, and no exponent lies beyond
_ALIKE = ("seq_len", "pass", "query_heads", "kv_heads", "head_dim")  # what differs within a run and makes other work
_NEVER_BELOW_ZERO = ("ms", "s", "MiB", "tok/s", "token", "J/tok", "W", "GB/s", "TFLOP/s", "MHz")


def own_gates(path: Path | None) -> Gates:
    """The rules at `path`, checked as far as that needs all kinds; None: the shipped ones, which a test checks.

    Raises GatesError: one line a mistake.
    """
    gates = load_gates(path)
    if path and (mistakes := list(misdirected(gates))):
        raise GatesError("\n".join(mistakes))
    return gates


def misdirected(gates: Gates) -> Iterator[str]:
    """One line for each rule whose quantities or implementations are unknown or unlike, whose bound nothing can miss on
    some hardware, or whose way to missing evidence is no spec."""
    from jobs import drill
    from jobs.adapters import peer_names
    from jobs.specs.fields import DENSE_KERNELS, WINDOW_ALONE
    from nsa_core.backends import backend_names  # with PyTorch, which a driver without rules of its own does not need

    names = [*backend_names(), *WINDOW_ALONE, *DENSE_KERNELS, *peer_names(), *get_args(drill.Behaviour)]
    names += RESULTS_NAME.values()
    if offered_kinds():  # with implementations of their own
        names = []
    declared = Quantities(quantity for kind in kinds().values() for quantity in kind.QUANTITIES)
    for target in gates.targets:
        for rule in target.rules:
            at, machines = f"targets.{target.name}.rules.{rule.rule}", gates.of(target)
            judged = {m: rule.judged_on(m, target.plan) for m in machines if not m or m.gpus >= rule.min_gpus}
            if not judged:
                yield f"{at}.min_gpus: {rule.min_gpus}: no hardware of the target has so many; lower it"
            forms = {"": rule} | {f" (on {machine.name})": form for machine, form in judged.items() if machine}
            mistakes = ((on, _mistake(form, target, declared, names)) for on, form in forms.items())
            if first := next((f"{at}.{mistake}{on}" for on, mistake in mistakes if mistake), None):
                yield first
            for measure in dict.fromkeys(form.measure for form in judged.values() if form.measure.spec):
                try:
                    load_spec(READY_SPECS / (measure.spec or ""), measure.set)
                except SpecError as err:
                    yield f"{at}.measure: {measure.spec}: {in_a_line(err)}"


def _mistake(rule: Rule, target: Target, declared: Quantities, names: Sequence[str]) -> str | None:
    """The first mistake; `names`: of all implementations, empty if there may be others."""
    for field, known in (("implementation", names), ("job", [*kinds()])):
        for name in _named(rule, field):
            if known and not fnmatch.filter(known, name):
                fix = (get_close_matches(name, known, 1) or [", ".join(known)])[0]
                return f"{field}: {name!r}: there is none; use {fix}"
    if rule.kind == "states":
        classes: list[Any] = [Exception]
        for each in classes:  # which grow meanwhile
            classes += each.__subclasses__()
        word, known = (rule.because or "").partition(":")[0], sorted({each.__name__ for each in classes})
        if not any(name.startswith(word) for name in known) and (close := get_close_matches(word, known, 1, 0.9)):
            return f"because: {rule.because!r}: no reason begins so; use {close[0]}"
        return None
    if rule.kind == "ratio" and "point_id" not in rule.same:
        sides = [rule.where.also(side.where).model_dump(by_alias=True) for side in (rule.numerator, rule.denominator)]
        fixed = {*rule.same, *(name for name in _ALIKE if all(isinstance(side[name], str | int) for side in sides))}
        if unlike := [name for name in _ALIKE if name not in fixed]:
            return f"same: compares points of unlike {', '.join(unlike)}; add these, or leave same out"
    proof = rule.proof if rule.kind == "metric" else None
    for field, name in [*(("metric", name) for name in _metrics(rule)), *([("proof", proof)] if proof else [])]:
        if not any(quantity.declares(name) for quantity in declared):
            close = get_close_matches(name, [quantity.name for quantity in declared], 1)
            return f"{field}: {name!r}: no kind measures it; use {close[0] if close else 'one of docs/metrics.md'}"
    first, *others = (declared.of(name) for name in _metrics(rule))
    for other in others:
        if first.unit != other.unit:
            return f"denominator: {other.name!r} is in {other.unit}, {first.name!r} in {first.unit}; use one unit"
    if rule.kind == "metric" and rule.unit != first.unit:
        return f"unit: {rule.unit!r}: {first.name} is in {first.unit!r}; write that"
    of_plan = {"plan": "tok/s", "seq_len": "token"}.get(str(rule.at_least))
    if of_plan and (rule.kind != "metric" or rule.unit != of_plan):
        return f"at_least: {rule.at_least!r}: is in {of_plan}, unlike the rule's value; write a number"
    share = first.unit == "%" and first.better is not None  # a change, which may be negative, has no better direction
    positive = rule.kind != "metric" or rule.absolute or first.unit in _NEVER_BELOW_ZERO or share
    if rule.kind == "exponent":
        positive = first.better is Better.LOWER  # a rate falls with the length
    most = _STEEPEST if rule.kind == "exponent" else _LARGEST
    if isinstance(rule.at_least, float) and rule.at_least <= (1 / _LARGEST if positive else -most):
        return f"at_least: {rule.at_least:g}: nothing is below it; give a bound that can be missed"
    if rule.at_most is not None and rule.at_most >= most:
        return f"at_most: {rule.at_most:g}: nothing is above it; give a bound that can be missed"
    bound, right = ("at_most", "at_least") if rule.at_least is None else ("at_least", "at_most")
    wrong = Better.HIGHER if bound == "at_most" else Better.LOWER
    sides: list[Any] = [rule.numerator.where, rule.denominator.where] if rule.kind == "ratio" else [rule.where]
    named = [(each.implementation,) if isinstance(each.implementation, str) else each.implementation for each in sides]
    controls = [all(name.startswith(("dense", "naive")) for name in each or ("",)) for each in named]
    own = next(each for each in target.rules if each.rule == rule.rule)
    alike = [each for each in target.rules if each.where == own.where and _sides(each) == _sides(own)]
    added = any(getattr(each, right) is not None for each in alike)
    better, of = first.better, first.name
    if controls == [True, False] and better is not None:  # a speedup
        better = Better.HIGHER if better is Better.LOWER else Better.LOWER
        of += " of dense or naive attention divided by another's"
    if better is wrong and not (all(controls) or added):
        return f"{bound}: of {of} {wrong} is better, so that only too good ones fail; use {right}, or add it"
    return None


def _sides(rule: Rule) -> Any:
    return (rule.numerator, rule.denominator) if rule.kind == "ratio" else (rule.kind, _metrics(rule))


def _metrics(rule: Rule) -> tuple[str, ...]:
    if rule.kind == "ratio":
        return rule.numerator.metric, rule.denominator.metric
    return () if rule.kind == "states" else (rule.metric,)


def _named(rule: Rule, field: str) -> Iterator[str]:
    """Names and patterns of implementations, or of jobs, in the rule's filters."""
    sides = (rule.numerator, rule.denominator) if rule.kind == "ratio" else ()
    for each in (rule, *rule.instead, *sides):
        names = getattr(each.where, field)
        yield from (names,) if isinstance(names, str) else names or ()
    yield from rule.but if rule.kind == "states" and field == "implementation" else ()
