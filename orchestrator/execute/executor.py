"""The interface between the scheduler and an executor, which runs its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jobs.schema.point import Machine
from jobs.schema.states import PointState
from jobs.specs.spec import JobSpec
from orchestrator.errors import UserError
from orchestrator.messages import Assignment, Conditions, Update

MOST_A_CORE = 16
"""Points at a time for each core, however small a share of one they ask for: each is a process, which imports torch."""


class ExecutorError(UserError):
    """The executor cannot run the spec. One line a mistake: field, value, fix."""


class ExecutorGone(RuntimeError):  # noqa: N818  (an event, as in "gone away")
    """The cluster went away; the rest of the run cannot be measured now."""


@dataclass(frozen=True)
class BatchEnded:
    """A batch will send no more updates.

    Attributes:
        state: None if its supervisor finished, else the state of its unfinished point: LOST, OOM, CANCELLED.
        reason: why the supervisor did not finish.
    """

    state: PointState | None = None
    reason: str | None = None


class Executor(Protocol):
    """Runs `supervise` for batches of points, `slots` batches at a time."""

    def probe(self) -> Mapping[str | None, Machine]:
        """The machine that the points will use, as each interpreter of the spec finds it; waits until a slot is free.

        Raises:
            ExecutorError: a path, interpreter or environment of the spec cannot be used there.
        """
        ...

    def slots(self, machine: Machine) -> int:
        """The number of batches that run at a time."""
        ...

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        """Start a batch; `batch` is the caller's number for it."""
        ...

    def poll(self, timeout: float) -> Sequence[tuple[int, Update | BatchEnded]]:
        """New updates, with their batches' numbers; waits up to `timeout` seconds for the first."""
        ...

    def cancel(self) -> None:
        """End all batches, their processes included; returns within about two seconds beyond the points' grace."""
        ...


def gpus_per_point(spec: JobSpec, machine: Machine) -> float:
    """GPUs for each point: the spec's num_gpus, else 1 on a CUDA device and 0 on a CPU."""
    num_gpus = spec.resources.num_gpus
    return num_gpus if num_gpus is not None else float(machine.device == "cuda")
