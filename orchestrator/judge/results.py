"""Verdicts on rules and targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.schema.quantities import readable
from jobs.schema.states import Result
from orchestrator.judge.hardware import Hardware
from orchestrator.judge.steps import Step


@dataclass(frozen=True)
class RuleVerdict:
    """The verdict on one rule.

    Attributes:
        rule, title: the rule's name and title.
        value, unit: the worst value found; None if nothing was measured.
        comparison, bound: "<=" or ">=", and the bound.
        margin: distance of the value to the bound, in the unit; negative if the bound is violated.
        reason: the evidence in words, or the missing evidence and how to measure it.
        evidence: ids of the points behind the value.
        run_id, commit: the run that the verdict rests on, and its commit if it is known.
        transferred: name of the other card that the evidence is of; None: of this one.
        step: the measurement that would settle it; None unless it is UNKNOWN.
        headline: whether its figure belongs into a sentence about the target.
    """

    rule: str
    title: str
    result: Result
    reason: str
    value: float | None = None
    unit: str = "1"
    comparison: str | None = None
    bound: float | None = None
    margin: float | None = None
    evidence: list[str] = field(default_factory=list)
    run_id: str | None = None
    commit: str | None = None
    transferred: str | None = None
    step: Step | None = None
    headline: bool = False

    @property
    def limit(self) -> str:
        """The bound in words: "<= 1.15"."""
        if self.bound is None:
            return ""
        return f"{self.comparison} {self.told(self.bound)}"

    def told(self, value: float) -> str:
        """A value of the rule with its unit, as it is read."""
        return readable(value, self.unit)


@dataclass(frozen=True)
class TargetVerdict:
    """The verdict on a target: NO-GO if a rule fails, else UNKNOWN if one lacks evidence, else GO.

    Attributes:
        name: the decision's name, with "/" and the hardware's where it has hardware.
        decision: the name of the target in YAML.
        hardware: the machine it is about; None: any.
    """

    name: str
    title: str
    result: Result
    rules: list[RuleVerdict]
    decision: str
    hardware: Hardware | None = None

    @property
    def full_title(self) -> str:
        """The title with the hardware."""
        return self.title + (f" (on {self.hardware.title})" if self.hardware else "")

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
