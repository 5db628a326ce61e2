"""Steps to a verdict: the commands that would settle what is UNKNOWN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


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
