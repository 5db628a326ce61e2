"""Points that fail on purpose, so that an operator can see a cluster deal with every kind of failure.

Only the time of each point is measured; the result is the state in which the point ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from jobs.point import Axes, Beat, Machine, Measurement, Metric, Point
from jobs.quantities import TELEMETRY, Quantity, Role
from jobs.spec import JobSpec

if TYPE_CHECKING:
    import torch

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

    from jobs.measure.environment import environment

    start = time.perf_counter()
    device = torch.device(config["device"])
    beat("drill")
    behave = _BEHAVIOURS[config["behaviour"]]
    behave(config, device, beat)
    elapsed = Metric.of(ELAPSED, time.perf_counter() - start, method="performance counter")
    return Measurement((elapsed,), environment=environment(device))


def _ok(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Do a little work on the device."""
    import torch

    torch.ones(8, device=device).sum().item()


def _slow(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Take long but report progress: slow is not hung."""
    steps = max(1, round(config["slow_s"] / 0.2))
    for done in range(steps):
        beat("working slowly", done, steps)
        time.sleep(config["slow_s"] / steps)


def _hang(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Sleep forever without reporting progress."""
    while True:
        time.sleep(3600)


def _timeout(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Report progress forever, so that only the point's deadline ends it."""
    done = 0
    while True:
        done += 1
        beat("working without end", done)
        time.sleep(0.2)


def _crash(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """End by SIGKILL, as under the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """End with exit code 0 but without a result: not a success."""
    os._exit(0)


def _oom(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Allocate 1 PiB, for PyTorch's own out-of-memory error without harm to the host."""
    import torch

    torch.empty(2**50, dtype=torch.int8, device=device)


def _raise(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    raise RuntimeError("raised on purpose")


def _spin(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Wait for a kernel that runs for years: the process is stuck in the driver, and the GPU is busy."""
    import torch

    torch.cuda._sleep(2**62)  # pyright: ignore[reportPrivateUsage] - clock cycles
    torch.cuda.synchronize(device)


def _fill(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Take the card's memory, a GiB at a time, until there is none left."""
    import torch

    taken: list[torch.Tensor] = []
    while True:
        taken.append(torch.zeros(2**30, dtype=torch.int8, device=device))


def _assert(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Read beyond a tensor's end: the assertion in the kernel leaves a CUDA context that runs nothing any more."""
    import torch

    torch.zeros(1, device=device)[torch.ones(1, dtype=torch.int64, device=device)]
    torch.cuda.synchronize(device)


_BEHAVIOURS: Mapping[str, Callable[[Mapping[str, Any], torch.device, Beat], None]] = {
    "ok": _ok,
    "slow": _slow,
    "hang": _hang,
    "timeout": _timeout,
    "crash": _crash,
    "exit": _exit,
    "oom": _oom,
    "raise": _raise,
    "spin": _spin,
    "fill": _fill,
    "assert": _assert,
}
