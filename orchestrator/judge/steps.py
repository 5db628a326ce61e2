"""Steps to a verdict: the commands that would settle what is UNKNOWN, with the minutes that they will take.

Minutes are those of earlier runs of a spec on the card, or of another card, scaled by published peaks.
"""

import csv
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from jobs.schema.peaks import BF16_PEAKS
from jobs.schema.states import FAILED, PointState, RunState
from orchestrator.judge.evidence import Run
from orchestrator.judge.rules import READY_SPECS, Rule
from orchestrator.judge.scope import RANKS, Hardware
from orchestrator.settings import example_spec

SHIPPED = Path(__file__).with_name("durations.csv")  # of complete runs whose journals are published with the project


@dataclass(frozen=True)
class Duration:
    """A complete run of a spec: its card (None: CPU), GPUs, number of points, and its source in words."""

    gpu: str | None
    gpus: int
    points: int
    minutes: float
    source: str


Durations = Mapping[tuple[str, str], Sequence[Duration]]


def durations(runs: Sequence[Run]) -> Durations:
    """The known durations by name and kind: of the stored runs, newest first, then the shipped ones.

    Crashes make a run quick and hangs slow, so runs with either do not count; lack of memory does neither.
    """
    known = defaultdict(list)
    for run in runs:
        if run.state is RunState.DONE and run.minutes and not run.states.keys() & (FAILED - {PointState.OOM}):
            ranks = max((part.row.get(RANKS) or 1 for part in run.parts), default=1)
            size = (ranks, sum(run.states.values()), run.minutes)
            known[run.name, run.kind].append(Duration(run.gpu, *size, f"{run}"))
    for row in csv.DictReader(SHIPPED.read_text("utf-8").splitlines()):
        source = "published results" + (f", run {row['run_id']}" if row["run_id"] else "")
        size = (max(int(row["gpus"] or 1), 1), int(row["points"]), float(row["minutes"]))
        known[row["name"], row["kind"]].append(Duration(row["gpu"] or None, *size, source))
    return known


@dataclass(frozen=True)
class Step:
    """A measurement that would settle rules."""

    command: str | None  # to paste into a shell; None if no job of this version measures it
    lacking: str  # without a command: the missing part, or how to measure it, in words
    hardware: str  # titles of the machines whose verdicts it settles
    gpus: int  # GPUs that it occupies
    minutes: float | None  # predicted duration; None if nothing is known about it
    basis: str  # the ground of the prediction, in words
    settles: tuple[str, ...]  # names of the rules
    spec: str | None = None  # the command's ready spec, its `--set` options and Ray's accelerator type
    overrides: tuple[str, ...] = ()
    accelerator: str | None = None
    price: float | None = None  # dollars for an hour of one of the GPUs; None: not known

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours that it is predicted to take."""
        return None if self.minutes is None else self.gpus * self.minutes / 60

    @property
    def cost(self) -> float | None:
        """Dollars that it is predicted to cost."""
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price


def step_of(rule: Rule, hardware: Hardware | None, known: Durations) -> Step:
    """The step that would settle a rule on a hardware; None: on any machine."""
    title, cards = (hardware.title, hardware.gpus) if hardware else ("any machine", 0)
    gpus = cards if rule.gpus == "all" else min(cards, 1)
    measure = rule.measure
    if measure.spec is None:
        return Step(None, measure.text or "", title, gpus, None, "not known", (rule.rule,))
    gpus = gpus if hardware else int((_content(measure.spec).get("resources") or {}).get("num_gpus") or 0)
    accelerator, price = (hardware.accelerator, hardware.price) if hardware else (None, None)
    overrides = (*measure.set, *([f"resources.accelerator_type={accelerator}"] if accelerator else []))
    options = [item for override in overrides for item in ("--set", override)]
    command = shlex.join(["nsa", "submit", str(Path(example_spec()).with_name(measure.spec)), *options])
    minutes, basis = _predict(_content(measure.spec), hardware, gpus, known)
    settles = (rule.rule,)
    return Step(command, "", title, gpus, minutes, basis, settles, measure.spec, overrides, accelerator, price)


def forecast(content: Mapping[str, Any], points: int, gpus: int, machines: Iterable[Hardware]) -> list[str]:
    """Time and price of a spec's content with so many points on each machine with so many GPUs: "5 min, 0.09 GPU-h,
    $0.35 on 1× H200". None of a spec whose duration has not been published with as many points; a soak says its own."""
    known = {spec: [each for each in runs if each.points == points] for spec, runs in durations(()).items()}
    lines = []
    for machine in machines:
        minutes, basis = _predict(content, machine, gpus, known) if machine.gpus == gpus else (None, "")
        if minutes is not None:
            step = Step("submit", "", machine.title, gpus, minutes, basis, (), price=machine.price)
            lines.append(f"{total([step])} on {machine.title} ({basis})")
    return lines


def _predict(
    content: Mapping[str, Any], hardware: Hardware | None, gpus: int, known: Durations
) -> tuple[float | None, str]:
    """Minutes that a spec takes on a hardware, and the ground for it; None where nothing is known."""
    if hardware is None:
        return None, "not known"
    if "minutes" in content:  # a soak's, for each kind of attention, on any card
        minutes = content["minutes"] * len(content.get("attention", [None]))
        return minutes, "the minutes of the spec, without start-up"
    alike = known.get((content["name"], content["kind"]), ())
    # The spec as it is, not a small run under its name: the most points known.
    points = max((each.points for each in alike), default=0)
    alike = [each for each in alike if each.points == points and each.gpus == max(gpus, 1)]
    here = next((each for each in alike if hardware.is_card(each.gpu)), None)
    if here is not None:
        return here.minutes, f"{here.source}: {points} points on {here.gpu or 'CPU'}"
    peak = next((peak for card, peak in BF16_PEAKS.items() if hardware.is_card(card)), None)
    other = next((each for each in alike if each.gpu in BF16_PEAKS), None)
    if hardware.gpu is None or peak is None or other is None or other.gpu is None:
        return None, "not known"
    other_peak = BF16_PEAKS[other.gpu]
    how = f"scaled by published bf16 peaks ({other_peak / 1e12:.0f} to {peak / 1e12:.0f} TFLOP/s)"
    if other_peak == peak:
        how = "whose published bf16 peak is the same"
    return other.minutes * other_peak / peak, f"{other.source}: {other.minutes:.3g} min on {other.gpu}, {how}"


@cache
def _content(spec: str) -> dict[str, Any]:
    return yaml.load((READY_SPECS / spec).read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C: tenfold


def merged(steps: Iterable[Step]) -> tuple[Step, ...]:
    """One step per command, or per missing part and number of GPUs, in the order given; those without a command last.

    A merged step settles the rules of all its parts on the hardware of all.
    """
    by_key: dict[tuple, Step] = {}
    for step in steps:
        key = (step.command, step.lacking, 0 if step.command else step.gpus)
        if before := by_key.get(key):
            titles = dict.fromkeys([*before.hardware.split(", "), *step.hardware.split(", ")])
            settles = tuple(dict.fromkeys([*before.settles, *step.settles]))
            step = replace(before, hardware=", ".join(titles), settles=settles)
        by_key[key] = step
    return tuple(sorted(by_key.values(), key=lambda step: step.command is None))


def total(steps: Sequence[Step]) -> str:
    """Time and cost of all steps: "41 min, 0.68 GPU-h, $2.60", "41+ min" if one is not known; "" without steps."""
    ready = [step for step in steps if step.command]
    if not ready:
        return "no command yet" if steps else ""
    minutes, hours, dollars = (
        [value for step in ready if (value := getattr(step, name)) is not None]
        for name in ("minutes", "gpu_hours", "cost")
    )
    more = "+" if len(minutes) < len(ready) else ""
    parts = [f"{max(1, round(sum(minutes)))}{more} min" if minutes else "time not known"]
    parts += [f"{sum(hours):.2g}{more} GPU-h"] if any(hours) else []
    parts += [f"${sum(dollars):.2f}{more}"] if dollars else []
    return ", ".join(parts)
