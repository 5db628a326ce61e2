"""Cases of points as the processes that measure them get them."""

from __future__ import annotations

import json
from typing import Any

from jobs.schema.point import Point
from jobs.specs.kinds import kind_module


def travelled(point: Point) -> Any:
    """The point's case after a journey through JSON."""
    return kind_module(point.kind).Case.model_validate(json.loads(json.dumps(point.config)))
