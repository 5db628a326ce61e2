"""Where points are measured: what the scheduler asks of an executor, and the one for the machine at hand."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jobs.measure import nvml
from jobs.point import Machine
from jobs.spec import JobSpec
from orchestrator.attempt import supervisor
from orchestrator.attempt.supervisor import Assignment, Conditions, ProbeError, Update
from orchestrator.errors import UserError
from orchestrator.states import PointState

_CANCEL_S = 2.0


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


class LocalExecutor:
    """Measures on this machine: a thread a slot, each with its share of the GPUs."""

    def __init__(self, spec: JobSpec) -> None:
        """Raises ExecutorError where this machine lacks what the spec asks for."""
        self._spec = spec
        self._gpus = nvml.visible_gpus() if spec.device != "cpu" else []
        self._cpus = _cpus()
        self._free: list[int] = []
        self._share: list[str | None] = []
        self._updates: queue.SimpleQueue[tuple[int, Update | BatchEnded]] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._threads: list[threading.Thread] = []
        self._check()

    def probe(self) -> Machine:
        asked = self._spec.resources.num_gpus
        try:
            return supervisor.probe(self._spec.device, gpus="" if asked == 0 else None)
        except ProbeError as err:
            raise ExecutorError(str(err)) from None

    def slots(self, machine: Machine) -> int:
        gpus = gpus_per_point(self._spec, machine)
        room = int(self._cpus // self._spec.resources.num_cpus)
        if gpus:
            room = min(room, int(len(self._gpus) / gpus + 1e-9))
        count = max(1, min(room, self._spec.resources.workers or room))
        self._share = [self._gpus_of(slot, gpus) for slot in range(count)]
        self._free = list(range(count))
        return count

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        slot = self._free.pop()
        thread = threading.Thread(target=self._run, args=(slot, batch, assignments, conditions), daemon=True)
        self._threads.append(thread)
        thread.start()

    def poll(self, timeout: float) -> list[tuple[int, Update | BatchEnded]]:
        try:
            return [self._updates.get(timeout=timeout)]
        except queue.Empty:
            return []

    def cancel(self) -> None:
        self._cancelled.set()
        deadline = time.monotonic() + _CANCEL_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _run(self, slot: int, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        end = BatchEnded()
        try:
            gpus = self._share[slot] if conditions.device == "cuda" else ""
            for update in supervisor.supervise(assignments, conditions, gpus, self._cancelled.is_set):
                self._updates.put((batch, update))
        except Exception as err:
            traceback.print_exc()  # a bug of ours: its place matters more than a tidy log
            end = BatchEnded(PointState.LOST, f"the supervisor failed: {type(err).__name__}: {err}")
        self._free.append(slot)
        self._updates.put((batch, end))

    def _gpus_of(self, slot: int, gpus: float) -> str | None:
        if not gpus:
            return ""
        first = int(slot * gpus + 1e-9)
        return ",".join(self._gpus[first : first + math.ceil(gpus)])

    def _check(self) -> None:
        asked = self._spec.resources
        errors = []
        if asked.num_cpus > self._cpus:
            errors.append(
                f"resources.num_cpus: {asked.num_cpus:g}: this machine has {self._cpus} CPU cores; ask for fewer"
            )
        if asked.num_gpus and asked.num_gpus > len(self._gpus):
            errors.append(
                f"resources.num_gpus: {asked.num_gpus:g}: this machine has {len(self._gpus)} GPUs; ask for fewer"
            )
        if asked.accelerator_type:
            errors.append(
                f"resources.accelerator_type: {asked.accelerator_type!r}: --local uses the machine at hand; remove it"
            )
        if errors:
            raise ExecutorError("\n".join(errors))


def _cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
