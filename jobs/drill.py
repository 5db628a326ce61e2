"""Points that fail on purpose, so that an operator can see a cluster deal with every kind of failure.

Only the time of each point is measured; the result is the state in which the point ends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from jobs.schema.point import Axes, Beat, Machine, Measurement, Metric, Point
from jobs.schema.quantities import TELEMETRY, Quantity, Role
from jobs.specs.spec import JobSpec

ELAPSED = Quantity("elapsed", "s", "Time that the point took", "elapsed", role=Role.HEADLINE)
QUANTITIES = (ELAPSED, *TELEMETRY)
IMPORTS = ("torch",)  # most of a driver's start, which only reads the spec

Behaviour = Literal["ok", "slow", "hang", "timeout", "crash", "exit", "oom", "raise", "skip", "spin", "fill", "assert"]
_ON_GPU = {"spin", "fill", "assert"}


class Spec(JobSpec):
    """Behaviours in the order to run them; a behaviour may appear several times."""

    kind: Literal["drill"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    behaviours: Annotated[list[Behaviour], Field(min_length=1)]
    slow_s: float = Field(default=3, gt=0, description="seconds that `slow` works on, with signs of progress")

    def points(self, machine: Machine) -> Sequence[Point]:
        """One point for each behaviour; the second `ok` is labelled "ok 2"."""
        points = []
        for index, behaviour in enumerate(self.behaviours):
            number = self.behaviours[: index + 1].count(behaviour)
            points.append(
                Point(
                    kind="drill",
                    label=behaviour if number == 1 else f"{behaviour} {number}",
                    config={
                        "behaviour": behaviour,
                        "number": number,
                        "slow_s": self.slow_s,
                        "device": machine.device,
                    },
                    axes=Axes(implementation=behaviour, workload="drill", device=machine.device),
                    skip_reason=_skip_reason(behaviour, machine),
                )
            )
        return points


def _skip_reason(behaviour: Behaviour, machine: Machine) -> str | None:
    if behaviour in _ON_GPU and machine.device != "cuda":
        return f"{behaviour} is a failure of a GPU; give device: cuda"
    return "skipped on purpose" if behaviour == "skip" else None


def measure(config: Mapping[str, Any], beat: Beat) -> Measurement:
    """Run the point's behaviour. Only `ok` and `slow` return."""
    import torch

    from jobs._drill_behaviours import BEHAVIOURS
    from jobs.hardware.environment import environment

    start = time.perf_counter()
    device = torch.device(config["device"])
    beat("drill")
    BEHAVIOURS[config["behaviour"]](config, device, beat)
    elapsed = Metric.of(ELAPSED, time.perf_counter() - start, method="performance counter")
    return Measurement((elapsed,), environment=environment(device))
