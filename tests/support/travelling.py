"""Small points of job kinds, and their cases as the processes that measure them get them."""

import json
from typing import Any

from jobs.schema.point import Machine, Measurement, Point
from jobs.specs.kinds import kind_module

CPU = Machine("cpu", "test processor", 8 * 2**30)
H200 = Machine("cuda", "NVIDIA H200", 140 * 2**30)
HEADS = {"query_heads": 4, "kv_heads": 2, "head_dim": 8}
NSA = {"cmp_block": 8, "cmp_stride": 4, "slc_block": 8, "slc_count": 4, "window": 16}
QUICK = {"repeats": 2, "min_s": 0, "max_s": 2, "warmup": 1}


def quiet(phase: str, done: int = 0, total: int = 0) -> None:
    """A Beat that reports nothing."""


def travelled(point: Point) -> Any:
    """The point's case after a journey through JSON."""
    return kind_module(point.kind).Case.model_validate(json.loads(json.dumps(point.config)))


def measured(point: Point, beat: Any = quiet) -> Measurement:
    """Measure a point in this process."""
    return kind_module(point.kind).measure(travelled(point), beat)


def values_of(result: Measurement) -> dict[str, float]:
    """Values of a measurement's metrics by name."""
    return {metric.name: metric.value for metric in result.metrics}
