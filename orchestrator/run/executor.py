"""The interface of executors: what the scheduler asks of whatever runs its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jobs.point import Machine
from jobs.spec import JobSpec
from orchestrator.errors import UserError
from orchestrator.messages import Assignment, Conditions, Update
from orchestrator.states import PointState


class ExecutorError(UserError):
    """The executor cannot run the spec. One line a mistake: field, value, fix."""


class ExecutorGone(RuntimeError):  # noqa: N818  (an event, as in "gone away")
    """The cluster went away; what is left of the run cannot be measured now."""


@dataclass(frozen=True)
class BatchEnded:
    """A batch will send no more updates.

    Attributes:
        state: None when its supervisor came to its end, else what its unfinished point is to be: LOST, OOM.
        reason: why the supervisor did not come to its end.
    """

    state: PointState | None = None
    reason: str | None = None


class Executor(Protocol):
    """Runs `supervise` for batches of points, `slots` batches at a time."""

    def probe(self) -> Machine:
        """The machine that the points will use; waits until a slot is free. Raises ExecutorError."""
        ...

    def slots(self, machine: Machine) -> int:
        """How many batches run at a time."""
        ...

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        """Hand out a batch under a number of the caller's."""
        ...

    def poll(self, timeout: float) -> Sequence[tuple[int, Update | BatchEnded]]:
        """What happened to the batches; waits up to `timeout` seconds for something to happen."""
        ...

    def cancel(self) -> None:
        """End all batches, their processes included; returns within about two seconds."""
        ...


def gpus_per_point(spec: JobSpec, machine: Machine) -> float:
    """GPUs that a point is given: what the spec says, else one on a CUDA device."""
    asked = spec.resources.num_gpus
    return asked if asked is not None else float(machine.device == "cuda")
