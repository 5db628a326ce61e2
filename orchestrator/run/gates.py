"""A user's rules, held against the quantities that the kinds declare: a rule that cannot fail decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import Better, Quantities
from jobs.specs.kinds import kinds
from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError
from orchestrator.judge.rules import READY_SPECS, Gates, GatesError, Rule, Target, load_gates

_NEVER_BELOW_ZERO = ("ms", "s", "MiB", "tok/s", "token", "J/tok", "W")


def own_gates(path: Path | None) -> Gates:
    """The rules at `path`, checked as far as that needs all kinds; None: the shipped ones, which a test checks.

    Raises GatesError: one line a mistake.
    """
    gates = load_gates(path)
    if path and (mistakes := list(misdirected(gates))):
        raise GatesError("\n".join(mistakes))
    return gates


def misdirected(gates: Gates) -> Iterator[str]:
    """One line for each rule whose quantities are unknown or unlike, whose bound nothing can miss, or whose way to
    missing evidence is no spec."""
    declared = Quantities(quantity for kind in kinds().values() for quantity in kind.QUANTITIES)
    for target in gates.targets:
        for rule in target.rules:
            if mistake := _mistake(rule, target, declared):
                yield f"targets.{target.name}.rules.{rule.rule}.{mistake}"
        judged = (rule for hardware in gates.of(target) for rule in target.rules_on(hardware))
        for name, measure in dict.fromkeys((rule.rule, rule.measure) for rule in judged if rule.measure.spec):
            try:
                load_spec(READY_SPECS / (measure.spec or ""), measure.set)
            except SpecError as err:
                yield f"targets.{target.name}.rules.{name}.measure: {measure.spec}: {in_a_line(err)}"


def _mistake(rule: Rule, target: Target, declared: Quantities) -> str | None:
    if rule.kind == "states":
        return None
    for name in _metrics(rule):
        if not any(quantity.declares(name) for quantity in declared):
            close = get_close_matches(name, [quantity.name for quantity in declared], 1)
            return f"metric: {name!r}: no kind measures it; use {close[0] if close else 'one of docs/metrics.md'}"
    first, *others = (declared.of(name) for name in _metrics(rule))
    for other in others:
        if first.unit != other.unit:
            return f"denominator: {other.name!r} is in {other.unit}, {first.name!r} in {first.unit}; use one unit"
    if rule.kind == "metric" and rule.unit != first.unit:
        return f"unit: {rule.unit!r}: {first.name} is in {first.unit!r}; write that"
    positive = rule.kind != "metric" or rule.absolute or first.unit in _NEVER_BELOW_ZERO
    if positive and isinstance(rule.at_least, float) and rule.at_least <= 0:
        return f"at_least: {rule.at_least:g}: nothing is below it; give a bound that can be missed"
    bound, right = ("at_most", "at_least") if rule.at_least is None else ("at_least", "at_most")
    wrong = Better.HIGHER if bound == "at_most" else Better.LOWER
    if first.better is wrong and not any(
        each.kind != "states" and _metrics(each) == _metrics(rule) and getattr(each, right) is not None
        for each in target.rules
    ):
        return f"{bound}: of {first.name} {wrong} is better, so that only too good ones fail; use {right}, or add it"
    return None


def _metrics(rule: Rule) -> tuple[str, ...]:
    if rule.kind == "ratio":
        return rule.numerator.metric, rule.denominator.metric
    return () if rule.kind == "states" else (rule.metric,)
