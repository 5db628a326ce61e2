"""The watch over a soak in one of its processes: memory, its alert and its limit, utilisation, the piece's end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from jobs.measure.memory import resident_bytes
from jobs.schema.point import Beat, reporter
from jobs.schema.quantities import Better, Quantity
from jobs.training.errors import MemoryLimit
from jobs.training.soak.history import GB, Interval, SoakHistory, SoakPlan

MEMORY_HELD = Quantity("memory_held", "MiB", "Memory held by a rank", "memory held", Better.LOWER)
HOST_MEMORY = Quantity("host_memory", "MiB", "Host memory of a rank", "host memory", Better.LOWER)

_LOOK_S = 1.0  # of training between two looks at the memory; each interval ends with one, too


class SoakWatch:
    """Takes in the steps of one process of a soak, into the history of all of them.

    Args:
        history: of the processes before; the watch goes on with it.
        device: of this rank, whose memory is watched: reserved by PyTorch's allocator on a GPU, else resident.
        beat: gets the alert and the live series MEMORY_HELD and HOST_MEMORY.
        utilization: of this rank's GPU [%]; None if it is unknown.
    """

    def __init__(
        self,
        plan: SoakPlan,
        history: SoakHistory,
        device: torch.device,
        rank: int,
        beat: Beat,
        utilization: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.history = history
        self.over = False
        """Whether the piece's time is over; equal on all ranks."""
        self._device = device
        self._rank = rank
        self._utilization = utilization
        self._report = reporter(beat)
        self._process = 0
        self._after_checkpoint = False
        self._begun_s = history.elapsed_s
        self._looked_s = -_LOOK_S

    def begin(self, process: int) -> None:
        """Begin the piece of process number `process`, once the history has been loaded."""
        self._process = process
        self._begun_s = self._looked_s = self.history.elapsed_s

    def note_checkpoint(self) -> None:
        """Note that this process begins a checkpoint, whose buffers stay whether or not it is saved.

        Looks at the memory, too: the last interval may end here without a look, at a process's first checkpoint or as
        the last one that the next process finds.

        Raises:
            MemoryLimit: as `take`.
        """
        if self._looked_s < self.history.elapsed_s:
            last = self.history.intervals[-1]
            self._look(last.end_step, last)
        self._after_checkpoint = True

    def take(self, step: int, loss: float, seconds: float, agreed_s: float, compute_ms: float | None = None) -> None:
        """Take in a step.

        Args:
            step: its number, from 1.
            loss: [nat/byte].
            seconds: its time.
            agreed_s: seconds of training up to it, equal on all ranks.
            compute_ms: this rank's own compute time; None if unknown.

        Raises:
            MemoryLimit: this rank holds more than the plan allows.
        """
        history, plan = self.history, self.plan
        last = self._interval()
        history.elapsed_s += seconds
        over = agreed_s >= min(self._begun_s + 60 * plan.piece_minutes, 60 * plan.minutes)
        history.pieces += over and not self.over
        self.over = over
        history.done = agreed_s >= 60 * plan.minutes
        last.steps += 1
        last.seconds += seconds
        last.loss += loss
        last.compute_ms += compute_ms or 0.0
        last.end_s, last.end_step = history.elapsed_s, step
        full = last.seconds >= plan.interval_s
        if self.over or full or history.elapsed_s - self._looked_s >= _LOOK_S:
            self._look(step, last)

    def _interval(self) -> Interval:
        """The interval that grows, a fresh one if the last is full or of another memory level."""
        intervals, plan = self.history.intervals, self.plan
        warm = self.history.elapsed_s - self._begun_s >= plan.warm_up_s
        fresh = Interval(self._process, 0, 0, warm=warm, after_checkpoint=self._after_checkpoint)
        last = intervals[-1] if intervals else None
        if last is None or last.seconds >= plan.interval_s or last.memory_level != fresh.memory_level:
            intervals.append(last := fresh)
        return last

    def _look(self, step: int, last: Interval) -> None:
        """Look at the memory since the last look, and at the GPU's utilisation."""
        since, self._looked_s = self._looked_s, self.history.elapsed_s
        allocated, reserved, resident = _memory(self._device)
        last.allocated, last.reserved = max(last.allocated, allocated), max(last.reserved, reserved)
        last.resident = max(last.resident, resident)
        if (busy := self._utilization()) is not None:
            last.busy += busy
            last.looks += 1
        held = reserved or resident
        self._report.sample(step, {MEMORY_HELD.name: held / 2**20, HOST_MEMORY.name: resident / 2**20}, self._rank)
        if held > self.plan.limit_gb * GB:
            raise MemoryLimit(self._words(held, step, f"limit_gb: {self.plan.limit_gb:g}"))
        if held > self.plan.alert_gb * GB:
            if self.history.alert_s == 0:
                self._report.warn(self._words(held, step, f"alert_gb: {self.plan.alert_gb:g}"))
            self.history.alert_s += self.history.elapsed_s - since

    def _words(self, held: int, step: int, bound: str) -> str:
        settled = next(self.history.settled(self.plan), None)
        before = "" if settled is None else f"; after the first warm-up it held {settled.held / GB:.3g} GB"
        where = f"after {self.history.elapsed_s / 60:.3g} min and {step:,} steps, in process {self._process + 1}"
        return f"rank {self._rank} holds {held / GB:.4g} GB, more than {bound}, {where}{before}"


def _memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes allocated (the highest since the last call) and reserved on a GPU, and resident in the host's memory."""
    if device.type != "cuda":
        return 0, 0, resident_bytes()
    allocated = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return allocated, torch.cuda.memory_reserved(device), resident_bytes()
