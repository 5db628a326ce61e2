"""Points that fail on purpose, so that an operator can see a cluster deal with every kind of failure.

Only the time of each point is measured; the result is the state in which the point ends.
"""

import itertools
import os
import signal
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from jobs.schema import point
from jobs.schema.axes import Axes
from jobs.schema.point import Beat, Device, Machine, Measurement, Metric, Point
from jobs.schema.quantities import TELEMETRY, Quantity, Role
from jobs.specs.spec import JobSpec

ELAPSED = Quantity("elapsed", "s", "Time that the point took", "elapsed", role=Role.HEADLINE)
QUANTITIES = (ELAPSED, *TELEMETRY)
IMPORTS = ("torch",)  # most of a driver's start, which only reads the spec

Behaviour = Literal["ok", "slow", "hang", "timeout", "crash", "exit", "oom", "raise", "skip", "spin", "fill", "assert"]
_ON_GPU = {"spin", "fill", "assert"}


class Case(point.Case):
    """One behaviour; `number` counts those of the same name, `slow_s` are the seconds of "slow"."""

    behaviour: Behaviour
    number: int
    slow_s: float
    device: Device


class Spec(JobSpec):
    """Behaviours in the order to run them; a behaviour may appear several times."""

    kind: Literal["drill"]  # pyright: ignore[reportIncompatibleVariableOverride] - frozen, so narrowing is safe
    behaviours: Annotated[list[Behaviour], Field(min_length=1, description="what the points do, in this order")]
    slow_s: float = Field(default=3, gt=0, description="seconds that `slow` works on, with signs of progress")

    def points(self, machine: Machine) -> Sequence[Point]:
        points = []
        for index, behaviour in enumerate(self.behaviours):
            number = self.behaviours[: index + 1].count(behaviour)
            skip = "skipped on purpose" if behaviour == "skip" else None
            if behaviour in _ON_GPU and machine.device != "cuda":
                skip = f"{behaviour} is a failure of a GPU; give device: cuda"
            label = behaviour if number == 1 else f"{behaviour} {number}"
            case = Case(behaviour=behaviour, number=number, slow_s=self.slow_s, device=machine.device)
            axes = Axes(implementation=behaviour, workload="drill", device=machine.device)
            points.append(Point("drill", label, case, axes, skip_reason=skip))
        return points


def measure(case: Case, beat: Beat) -> Measurement:
    """Run the point's behaviour. Only `ok` and `slow` return."""
    import torch

    from jobs.hardware.environment import environment

    start, device = time.perf_counter(), torch.device(case.device)
    beat("drill")
    match case.behaviour:
        case "ok":
            torch.ones(8, device=device).sum().item()
        case "slow":  # slow is not hung: progress is reported
            steps = max(1, round(case.slow_s / 0.2))
            for done in range(steps):
                beat("working slowly", done, steps)
                time.sleep(case.slow_s / steps)
        case "hang":
            while True:
                time.sleep(3600)
        case "timeout":  # only the point's own deadline ends it
            for done in itertools.count(1):
                beat("working without end", done)
                time.sleep(0.2)
        case "crash":  # as under the kernel's out-of-memory killer
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":  # exit code 0 without a result is no success
            os._exit(0)
        case "oom":  # 1 PiB: PyTorch's own error, without harm to the host
            torch.empty(2**50, dtype=torch.int8, device=device)
        case "raise":
            raise RuntimeError("raised on purpose")
        case "spin":  # a kernel of years: the process is stuck in the driver, and the GPU is busy
            torch.cuda._sleep(2**62)  # pyright: ignore[reportPrivateUsage] - clock cycles
            torch.cuda.synchronize(device)
        case "fill":  # the card's memory, a GiB at a time
            taken = []
            while True:
                taken.append(torch.zeros(2**30, dtype=torch.int8, device=device))
        case "assert":  # the assertion in the kernel leaves a CUDA context that runs nothing any more
            torch.zeros(1, device=device)[torch.ones(1, dtype=torch.int64, device=device)]
            torch.cuda.synchronize(device)
    elapsed = Metric.of(ELAPSED, time.perf_counter() - start, method="performance counter")
    return Measurement((elapsed,), environment=environment(device))
