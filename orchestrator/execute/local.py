"""The executor for this machine: a thread and a share of the GPUs for each slot."""

import math
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

from jobs.hardware import nvml
from jobs.schema.point import Machine
from jobs.schema.states import PointState
from jobs.specs.spec import JobSpec
from orchestrator.errors import UserError
from orchestrator.execute import requirements, supervisor
from orchestrator.execute.requirements import MOST_A_CORE, Requirements, gpus_per_point
from orchestrator.execute.supervisor import Assignment, BatchEnded, Conditions, Update

_CANCEL_S = 2.0


class LocalExecutor:
    """Measures on this machine."""

    def __init__(self, spec: JobSpec) -> None:
        """Raises UserError if this machine lacks resources that the spec asks for."""
        self._spec = spec
        self._gpus = nvml.visible_gpus() if spec.device != "cpu" else []
        self._cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._free: list[str] = []  # CUDA_VISIBLE_DEVICES of each free slot
        self._updates: queue.SimpleQueue[tuple[int, Update | BatchEnded]] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._threads: list[threading.Thread] = []
        resources, errors = spec.resources, []
        amounts = (("num_cpus", self._cpus, "CPU cores"), ("num_gpus", len(self._gpus), "GPUs"))
        for name, available, what in amounts:
            if (wanted := getattr(resources, name) or 0) > available:
                errors.append(f"resources.{name}: {wanted:g}: this machine has {available} {what}; ask for fewer")
        if resources.accelerator_type:
            problem = "--local uses the machine at hand; remove it"
            errors.append(f"resources.accelerator_type: {resources.accelerator_type!r}: {problem}")
        if errors:
            raise UserError("\n".join(errors))

    def gpus(self) -> Mapping[str, int]:
        """The number of GPUs that points may get, by the node's name."""
        return {socket.gethostname(): len(self._gpus)}

    def probe(self) -> Mapping[str | None, Machine]:
        """The machine that the points will use, as each interpreter of the spec finds it.

        Raises UserError: a path, interpreter or environment of the spec cannot be used there.
        """
        required = Requirements.of(self._spec)
        return requirements.check(required, gpus="" if required.gpus == 0 else None)

    def slots(self, machine: Machine) -> int:
        """The number of batches that run at a time."""
        gpus = gpus_per_point(self._spec, machine)
        room = min(int(self._cpus // self._spec.resources.num_cpus), MOST_A_CORE * self._cpus)
        if gpus:
            room = min(room, int(len(self._gpus) / gpus + 1e-9))
        count = max(1, min(room, self._spec.resources.workers or room))
        firsts = [int(slot * gpus + 1e-9) for slot in range(count)]
        self._free = [",".join(self._gpus[first : first + math.ceil(gpus)]) for first in firsts]
        return count

    def submit(self, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        """Start a batch; `batch` is the caller's number for it."""
        arguments = (self._free.pop(), batch, assignments, conditions)
        thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        thread.start()
        self._threads.append(thread)

    def poll(self, timeout: float) -> list[tuple[int, Update | BatchEnded]]:
        """New updates, with their batches' numbers; waits up to `timeout` seconds for the first."""
        try:
            return [self._updates.get(timeout=timeout)]
        except queue.Empty:
            return []

    def cancel(self, grace_s: float) -> None:
        """End all batches, their processes included; returns within about two seconds beyond the points' grace."""
        self._cancelled.set()
        deadline = time.monotonic() + _CANCEL_S + grace_s
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _run(self, gpus: str, batch: int, assignments: Sequence[Assignment], conditions: Conditions) -> None:
        end = BatchEnded()
        try:
            visible = gpus if conditions.device == "cuda" else ""
            for update in supervisor.supervise(assignments, conditions, visible, self._cancelled.is_set):
                self._updates.put((batch, update))
        except Exception as err:
            traceback.print_exc()  # a bug of ours: its location matters more than a tidy log
            end = BatchEnded(PointState.LOST, f"the supervisor failed: {type(err).__name__}: {err}")
        self._free.append(gpus)
        self._updates.put((batch, end))
