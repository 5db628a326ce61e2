"""Decisions: the verdicts on all hardware of a target, in a sentence, and the steps that are left."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jobs.schema.states import Result
from orchestrator.judge.candidates import quoted
from orchestrator.judge.rules import QUESTIONS, Gates, Plan
from orchestrator.judge.steps import Step, merged
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict, worst

_ORDER = [Result.NO_GO, Result.GO, Result.UNKNOWN]  # of sentences
_NAMED = 3  # more rules than these are counted


@dataclass(frozen=True)
class Decision:
    """A target of the YAML with its verdicts, one per hardware."""

    name: str
    title: str
    plan: Plan | None
    verdicts: tuple[TargetVerdict, ...]

    @property
    def result(self) -> Result:
        """NO-GO if one of its hardware is NO-GO, else UNKNOWN if one is, else GO."""
        return worst(verdict.result for verdict in self.verdicts)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that would settle the open rules, in the order to run; those without a command last."""
        return merged(rule.step for verdict in self.verdicts for rule in verdict.rules if rule.step)

    @property
    def sentences(self) -> list[str]:
        """The result in words, with headline figures: one a machine that was measured, and one for the others."""
        judged = [each for each in self.verdicts if each.measured or each.result is not Result.UNKNOWN]
        said = [_clause(each) for each in sorted(judged, key=lambda each: _ORDER.index(each.result))]
        blank = [each for each in self.verdicts if each not in judged]
        titles = [each.hardware.title for each in blank if each.hardware]
        where = " or ".join(filter(None, (", ".join(titles[:-1]), *titles[-1:])))
        nothing = "nothing measured" + (f" on {where}" if where else "")
        if self.result is Result.UNKNOWN:
            said = ["Not yet" + (f": {nothing}" if blank else ""), *said]
        elif blank:
            said.append(f"N{nothing[1:]}")
        return [f"{each}." for each in said]


def decisions(gates: Gates, verdicts: Sequence[TargetVerdict]) -> list[Decision]:
    """The verdicts by target, in the order of the rules' file."""
    of = {target.name: tuple(each for each in verdicts if each.decision == target.name) for target in gates.targets}
    return [Decision(target.name, target.title, target.plan, of[target.name]) for target in gates.targets]


def query(verdict: TargetVerdict) -> str:
    """One SQL query with a row for each measured figure in the verdict's sentence: its name, its value."""
    figures = [(rule.rule, rule.query) for rule in _said(verdict) if rule.query]
    if (cost := _cost(verdict)) is not None:
        sql = f"{cost.gpu_hours * cost.rate!r} / ({cost.query})"
        figures.append(("GPU-hours", f"SELECT {sql}"))
        if cost.price is not None:
            figures.append(("dollars", f"SELECT {cost.price} * {sql}"))
    if verdict.crossing and verdict.crossing.query:
        figures.append(("crossover", verdict.crossing.query))
    return "\nUNION ALL ".join(f"SELECT {quoted(name)} AS figure, ({sql}) AS value" for name, sql in figures)


def answers(verdict: TargetVerdict) -> str:
    """The answers to a plan's questions in words, what fails first, then what it takes and where NSA begins to pay."""
    parts = []
    for question, result in sorted(verdict.questions.items(), key=lambda each: _ORDER.index(each[1])):
        at = f" at S={verdict.plan.seq_len:,}" if question == QUESTIONS[-1] and verdict.plan else ""
        words = f"{'not ' if result is Result.NO_GO else ''}{question}{at}"
        if result is Result.UNKNOWN:
            rules = [rule for rule in verdict.rules if rule.question == question]
            words = f"not known whether {question}{at} (open: {_open(rules)})"
        figures = [
            (rule.says or _figure(rule, named=result is Result.NO_GO)) + (" (transferred)" if rule.transferred else "")
            for rule in _said(verdict)
            if rule.question == question
        ]
        parts.append(f"{words}: {', '.join(figures)}" if figures else words)
    if (cost := _cost(verdict)) is not None:
        money = "" if cost.price is None else f", ${_number(cost.gpu_hours * cost.price, 2)}"
        parts.append(f"the plan takes {_number(cost.gpu_hours, 2)} GPU-hours{money}")
    if lesser := sum(rule.transferred is not None for rule in verdict.rules):
        parts.append(f"{lesser} of {len(verdict.rules)} rules rest on transferred evidence")
    text = "; ".join(parts)
    return f"{text}. {verdict.crossing.words}" if verdict.crossing else text


def _open(rules: Sequence[RuleVerdict]) -> str:
    """The rules without a result: "a, b", or "5 of 8 rules"."""
    names = [rule.rule for rule in rules if rule.result is Result.UNKNOWN]
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} of {len(rules)} rules"


def _said(verdict: TargetVerdict) -> list[RuleVerdict]:
    """The rules whose figures the sentence has: of each question those that fail, else its headlines."""
    said = []
    for question in verdict.questions:
        rules = [rule for rule in verdict.rules if rule.question == question and rule.value is not None]
        failed = [rule for rule in rules if rule.result is Result.NO_GO]
        said += failed or [rule for rule in rules if rule.headline]
    return said


class _Cost(NamedTuple):
    """GPU-hours of a plan at the throughput `rate` [tok/s], the SQL of that, and dollars for one of them."""

    gpu_hours: float
    rate: float
    query: str
    price: float | None


def _cost(verdict: TargetVerdict) -> _Cost | None:
    """The plan's cost at its measured throughput; None if no throughput was measured in its configuration."""
    plan, machine = verdict.plan, verdict.hardware
    for rule in verdict.rules:
        own = rule.headline and rule.unit == "tok/s" and not rule.transferred
        if plan and machine and own and rule.value and rule.query:
            return _Cost(plan.hours_at(rule.value) * max(machine.gpus, 1), rule.value, rule.query, machine.price)
    return None


def _clause(verdict: TargetVerdict) -> str:
    """A verdict in words: "On 1x H200: 36,271 tok/s of 2,370 needed; open: soak-memory-slope"."""
    machine = f" on {verdict.hardware.title}" if verdict.hardware else ""
    if verdict.questions:
        return f"O{machine[2:]}: {answers(verdict)}" if machine else answers(verdict)
    if verdict.result is Result.NO_GO:
        failed = [rule for rule in verdict.rules if rule.result is Result.NO_GO]
        return f"No{machine}: {', '.join(_figure(rule, named=True) for rule in failed)}"
    figures = ", ".join(_figure(rule) for rule in verdict.rules if rule.headline and rule.value is not None)
    if verdict.result is Result.GO:
        return f"Go{machine}" + (f": {figures}" if figures else "")
    left = _open(verdict.rules)
    left = f"{left} open" if left.endswith(" rules") else f"open: {left}"
    left = f"{figures}; {left}" if figures else left
    return f"O{machine[2:]}: {left}" if machine else f"{left[0].upper()}{left[1:]}"


def _figure(rule: RuleVerdict, *, named: bool = False) -> str:
    """A rule's value and bound: "36,271 tok/s of 2,370 needed", "2.4 of 60.5 GiB", "naive 1.3 (at least 1.7)"."""
    assert rule.value is not None, "only judged rules are shown"
    assert rule.bound is not None, "every judged rule has a bound"
    scale, unit = (1024, "GiB") if rule.unit == "MiB" else (1, "" if rule.unit == "1" else rule.unit)
    value, bound = rule.value / scale, rule.bound / scale
    # Three digits, or as many as tell them apart: "1.1502" beside "1.15" is no "1.15".
    digits = next(n for n in range(3, 18) if value == bound or _number(value, n) != _number(bound, n))
    shown, limit = _number(value, digits), _number(bound, digits)
    if named or not unit:
        side = "at most" if rule.comparison == "<=" else "at least"
        return f"{rule.rule} {shown} ({side} {limit} {unit}".rstrip() + ")"
    return f"{shown} of {limit} {unit}" if rule.comparison == "<=" else f"{shown} {unit} of {limit} needed"


def _number(value: float, digits: int) -> str:
    size = len(str(int(abs(value))))
    return f"{value:,.{max(0, digits - size)}f}" if size >= 3 else f"{value:.{digits}g}"
