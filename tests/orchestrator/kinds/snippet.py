"""A job kind for tests: its points run a piece of code. Imports no torch, so that a child starts at once."""

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from jobs.schema import point as schema
from jobs.schema.axes import Axes
from jobs.schema.point import Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import TIME
from jobs.specs.spec import JobSpec

QUANTITIES = (TIME,)


class Case(schema.Case):
    code: str


class Spec(JobSpec):
    """A point for each piece of `codes`."""

    kind: Literal["snippet"]  # pyright: ignore[reportIncompatibleVariableOverride]
    codes: list[str]

    def points(self, machine: Machine) -> Sequence[Point]:
        return [point(code, index) for index, code in enumerate(self.codes)]


def point(code: str, index: int = 0) -> Point:
    return Point("snippet", f"snippet {index}", Case(code=code), Axes(implementation="snippet", device="cpu"))


def measure(case: Case, beat: Beat) -> Measurement:
    """Run the code with `beat` in reach; what it assigns to `value` is the metric, to `files` the artifacts."""
    scope: dict[str, Any] = {"beat": beat, "os": os, "sys": sys, "value": 1.0, "files": {}}
    exec(case.code, scope)
    environment = {
        "pid": os.getpid(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    return Measurement((Metric("time", "ms", scope["value"]),), {"all": "snippet"}, environment, scope["files"])
