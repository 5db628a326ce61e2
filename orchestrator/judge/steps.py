"""Steps to a verdict: the commands that would settle what is UNKNOWN."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.judge.durations import Durations, gpus_of
from orchestrator.judge.hardware import Hardware
from orchestrator.judge.rules import Rule
from orchestrator.settings import example_spec


@dataclass(frozen=True)
class Step:
    """A measurement that would settle rules.

    Attributes:
        command: to paste into a shell; None if no job of this version measures it.
        lacking: without a command: the missing part, or how to measure it, in words.
        hardware: titles of the machines whose verdicts it settles.
        gpus: GPUs that it occupies.
        minutes: predicted duration; None if nothing is known about it.
        basis: the ground of the prediction, in words.
        settles: names of the rules.
        spec, overrides, accelerator: the command's ready spec, its `--set` options and Ray's accelerator type.
    """

    command: str | None
    lacking: str
    hardware: str
    gpus: int
    minutes: float | None
    basis: str
    settles: tuple[str, ...]
    spec: str | None = None
    overrides: tuple[str, ...] = ()
    accelerator: str | None = None


def step_of(rule: Rule, hardware: Hardware | None, durations: Durations) -> Step:
    """The step that would settle a rule on a hardware; None: on any machine."""
    title, cards = (hardware.title, hardware.gpus) if hardware else ("any machine", 0)
    gpus = cards if rule.gpus == "all" else min(cards, 1)
    measure = rule.measure
    if measure.spec is None:
        lacking = measure.lacking or measure.text or ""
        return Step(None, lacking, title, gpus, None, "not known", (rule.rule,))
    gpus = gpus if hardware else gpus_of(measure.spec)
    accelerator = hardware.accelerator if hardware else None
    overrides = (*measure.set, *([f"resources.accelerator_type={accelerator}"] if accelerator else []))
    options = [item for override in overrides for item in ("--set", override)]
    command = shlex.join(["nsa", "submit", str(Path(example_spec()).with_name(measure.spec)), *options])
    minutes, basis = durations.predict(measure.spec, hardware, gpus)
    return Step(command, "", title, gpus, minutes, basis, (rule.rule,), measure.spec, overrides, accelerator)


def merged(steps: Iterable[Step]) -> tuple[Step, ...]:
    """One step per command, or per missing part and number of GPUs, in the order given; those without a command last.

    A merged step settles the rules of all its parts on the hardware of all.
    """
    found: dict[tuple, Step] = {}
    for step in steps:
        key = (step.command, step.lacking, 0 if step.command else step.gpus)
        if before := found.get(key):
            titles = dict.fromkeys([*before.hardware.split(", "), *step.hardware.split(", ")])
            settles = tuple(dict.fromkeys([*before.settles, *step.settles]))
            step = replace(before, hardware=", ".join(titles), settles=settles)
        found[key] = step
    return tuple(sorted(found.values(), key=lambda step: step.command is None))
