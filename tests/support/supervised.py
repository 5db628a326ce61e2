"""Points run without a driver: supervised as a run does it, or as a search asks for them, without processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.schema.point import EndedPoint, Machine, Point
from jobs.schema.states import PointState
from jobs.specs.spec import JobSpec
from orchestrator.execute.supervisor import Assignment, Conditions, supervise
from orchestrator.store.records import ArtifactRecord, OutcomeRecord

Outcome = tuple[PointState, Mapping[str, float]]


@dataclass(frozen=True)
class Ended:
    """An outcome and the files that were kept of it: name -> text in the store."""

    outcome: OutcomeRecord
    files: dict[str, str]


def supervised(points: Sequence[Point], conditions: Conditions, store: Path, **options: Any) -> list[Any]:
    """All updates of points "r/0", "r/1", ..., with each outcome as Ended; files are kept in the folder `store`."""
    assignments = [Assignment("r", f"r/{number}", 1, point) for number, point in enumerate(points)]
    updates = list(supervise(assignments, replace(conditions, store=f"file://{store}"), **options))

    def read(outcome: OutcomeRecord) -> Ended:
        kept = [u.artifact for u in updates if isinstance(u, ArtifactRecord) and u.point_id == outcome.point_id]
        return Ended(outcome, {file.name: (store / file.path).read_text() for file in kept})

    return [read(update) if isinstance(update, OutcomeRecord) else update for update in updates]


def searched(spec: JobSpec, machine: Machine, outcome: Callable[[Point], Outcome]) -> tuple[list[Point], list[Point]]:
    """Ask `next_points` until nothing follows: the points that were tried, in order, and the conclusions."""
    machines = {None: machine}
    ended: list[EndedPoint] = []
    conclusions: list[Point] = []
    waiting = spec.all_points(machines)
    labels = {point.label for point in waiting}
    while waiting:
        point = waiting.pop(0)
        if point.conclusion is not None:
            conclusions.append(point)
            ended.append(EndedPoint(point, PointState.OK))
        else:
            state, metrics = outcome(point)
            ended.append(EndedPoint(point, state, "as the test says", metrics))
        new = [each for each in spec.all_points(machines, ended) if each.label not in labels]
        labels |= {each.label for each in new}
        waiting += new
    return [each.point for each in ended if each.point.conclusion is None], conclusions


def values(conclusion: Point) -> dict[str, float]:
    """Metrics of a conclusion by name."""
    assert conclusion.conclusion is not None
    return {metric.name: metric.value for metric in conclusion.conclusion.metrics}
