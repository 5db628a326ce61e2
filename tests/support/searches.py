"""Runs a spec's search without processes: `next_points` is asked until nothing follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jobs.schema.point import EndedPoint, Machine, Point
from jobs.schema.states import PointState
from jobs.specs.spec import JobSpec

Outcome = tuple[PointState, Mapping[str, float]]


def searched(spec: JobSpec, machine: Machine, outcome: Callable[[Point], Outcome]) -> tuple[list[Point], list[Point]]:
    """Points that were tried, in order, and the conclusions."""
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
        new = [each for each in spec.all_next_points(machines, ended) if each.label not in labels]
        labels |= {each.label for each in new}
        waiting += new
    return [each.point for each in ended if each.point.conclusion is None], conclusions


def values(conclusion: Point) -> dict[str, float]:
    """Metrics of a conclusion by name."""
    assert conclusion.conclusion is not None
    return {metric.name: metric.value for metric in conclusion.conclusion.metrics}
