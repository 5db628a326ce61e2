"""Where NSA begins to pay: the length from which on it takes less time than the fastest dense attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from orchestrator.judge.candidates import Candidate, find
from orchestrator.judge.evidence import Run, preferred
from orchestrator.judge.growth import short
from orchestrator.judge.rules import Crossover, Gates, RatioRule
from orchestrator.judge.scope import LENGTH, Hardware, Scope


@dataclass(frozen=True)
class Crossing:
    """The crossover of a workload on a machine."""

    name: str  # of the workload in the rules
    title: str
    hardware: Hardware
    ratios: dict[int, float]  # time of NSA over that of the fastest dense attention, by length, ascending
    points: dict[int, tuple[str, ...]]  # NSA's point and dense attention's, by length
    seq_len: float | None  # the crossover, interpolated; None where no two lengths enclose it
    between: tuple[int, int]  # the measured lengths that enclose it, or the shortest and the longest measured
    query: str | None  # SQL that gives `seq_len`; None without one
    doubts: tuple[str, ...] = ()  # why a decision should not rest on it

    @property
    def words(self) -> str:
        """The crossover in words: "NSA pays from S = 7.3K (measured at 2K and 8K)"."""
        low, high = map(short, self.between)
        paying = [short(length) for length, ratio in self.ratios.items() if ratio < 1]
        if self.seq_len is not None:
            words = f"NSA pays from S = {short(round(self.seq_len))} (measured at {low} and {high})"
        elif len(paying) == len(self.ratios):
            words = f"NSA pays at all lengths measured, {low} to {high}"
        elif paying:
            words = f"NSA pays at S = {', '.join(paying)} of the lengths measured, {low} to {high}"
        else:
            words = f"NSA does not pay at any length measured, {low} to {high}"
        return words + (f"; doubtful: {', '.join(self.doubts)}" if self.doubts else "")


def crossings(runs: Sequence[Run], gates: Gates) -> list[Crossing]:
    """The crossover of each workload on each machine that has evidence."""
    found = []
    machines = [each for each in gates.hardware if each.gpus == 1]
    for workload, hardware in product(gates.crossovers, machines):
        sides = {name: getattr(workload, name) for name in ("title", "numerator", "denominator", "same")}
        about = {"rule": "crossover", "kind": "ratio", "measure": "run it", "at_most": 1}
        rule, scope = RatioRule.model_validate(about | sides), Scope(workload.where, hardware)
        newest: dict[int, tuple[Candidate, Run]] = {}
        both: dict[Any, set[int]] = {}  # lengths of both sides, of runs that are alike
        for run in preferred(runs, scope):
            if (alike := (run.shape, run.name)) not in both:
                above, below = (run.measured(scope, side.where) for side in (rule.numerator, rule.denominator))
                both[alike] = above & below if LENGTH in rule.same else above
            if both[alike] <= newest.keys():
                continue  # without reading it: all of its lengths are those of newer runs
            here: dict[int, tuple[Candidate, Run]] = {}
            for pair in find(rule, run, scope).candidates:  # the fastest of several dense attentions counts
                if pair.seq_len and (pair.seq_len not in here or here[pair.seq_len][0].value < pair.value):
                    here[pair.seq_len] = pair, run
            newest = here | newest
        if newest:
            found.append(_crossing(workload, hardware, newest))
    return found


def _crossing(workload: Crossover, hardware: Hardware, newest: dict[int, tuple[Candidate, Run]]) -> Crossing:
    """The crossover, by the newest pair of NSA and dense attention of each length, and its run."""
    lengths = sorted(newest)
    ratios = {length: newest[length][0].value for length in lengths}
    place, query, between, used = None, None, (lengths[0], lengths[-1]), list(newest)
    crossed = [(a, b) for a, b in pairwise(lengths) if ratios[a] >= 1 > ratios[b]]
    if crossed and ratios[lengths[-1]] < 1:
        low, high = used = between = crossed[-1]
        place = low + (high - low) * (ratios[low] - 1) / (ratios[low] - ratios[high])
        before, after = (f"({newest[each][0].query})" for each in (low, high))
        query = f"SELECT {low} + {high - low} * ({before} - 1) / ({before} - {after})"
    pairs = [newest[length] for length in used]
    metric = workload.numerator.metric
    doubts = [doubt for pair, run in pairs for doubt in run.doubts(pair.points, hardware, metric)]
    if len({run.commit for _, run in pairs}) > 1:
        doubts.append("the lengths are of different commits")
    points = {length: tuple(newest[length][0].points) for length in lengths}
    about = (workload.name, workload.title, hardware, ratios, points)
    return Crossing(*about, place, between, query, tuple(dict.fromkeys(doubts)))
