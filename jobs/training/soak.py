"""A soak on one rank: its plan, its history through all of its processes, and the watch that writes it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from jobs.measure.memory import resident_bytes
from jobs.schema.point import Beat, reporter
from jobs.schema.quantities import Better, Quantity
from jobs.training.errors import MemoryLimit

MEMORY_HELD = Quantity("memory_held", "MiB", "Memory held by a rank", "memory held", Better.LOWER)
HOST_MEMORY = Quantity("host_memory", "MiB", "Host memory of a rank", "host memory", Better.LOWER)

INTERVALS = 1000  # that a whole soak is divided into
GB = 10**9
_LOOK_S = 1.0  # of training between two looks at the memory; each interval ends with one, too

_COLUMNS = (  # of the table
    "process,end_s,end_step,steps,step_ms,loss,allocated_mib,reserved_mib,driver_mib,resident_mib,warm_up,checkpoints,"
    "compute_ms,busy"
)


@dataclass(frozen=True)
class SoakPlan:
    """Times and bounds of a soak."""

    minutes: float  # of training, over all pieces
    piece_minutes: float  # of training after which a process ends, and a fresh one goes on
    alert_gb: float  # memory that a rank holds [GB]: beyond it a warning
    limit_gb: float  # and beyond this the end

    @property
    def interval_s(self) -> float:
        """Seconds of an interval of the history."""
        return 60 * self.minutes / INTERVALS

    @property
    def warm_up_s(self) -> float:
        """Seconds of each process that do not count for slopes and times: its first tenth, at most a minute."""
        return min(60.0, 6 * self.piece_minutes)


@dataclass
class Interval:
    """Steps in a row. Sizes [bytes] are the highest; those of the GPU are 0 on a CPU."""

    process: int  # number of the process among those that trained, from 0
    end_s: float  # seconds of training at its end
    end_step: int  # steps done at its end
    steps: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # sum over its steps [nat/byte]
    allocated: int = 0
    reserved: int = 0
    driver: int = 0  # in use on the card as the driver counts them, other processes included
    resident: int = 0  # of the process in the host's memory
    warm: bool = False  # whether it begins after the warm-up of its process
    checkpoints: int = 0  # that its process had begun; the first one leaves buffers behind, saved or not
    compute_ms: float = 0.0  # sum of the rank's own compute times; 0 where they are unknown
    busy: float = 0.0  # sum of the utilisation of its GPU in `looks` looks [%]
    looks: int = 0

    @property
    def held(self) -> int:
        """Bytes that the process holds: of the GPU if it uses one, else of the host's memory."""
        return self.reserved or self.resident


@dataclass
class SoakHistory:
    """Findings of a soak up to a step; checkpoints store them, so that each process goes on with the whole."""

    elapsed_s: float = 0.0  # of training, of all processes
    alert_s: float = 0.0  # those above the alert
    pieces: int = 0  # processes that reached the end of their piece
    done: bool = False  # whether the whole time has been trained
    intervals: list[Interval] = field(default_factory=list)  # in order; the last one may still grow

    def settled(self, plan: SoakPlan) -> list[Interval]:
        """Intervals that count for slopes and times: without warm-up, and not cut short by a first checkpoint."""
        return [each for each in self.intervals if each.warm and each.seconds >= plan.interval_s / 2]

    def to_csv(self) -> str:
        """A table of all intervals: seconds, MiB, nat/byte, ms of a step, %."""
        lines = [_COLUMNS]
        for each in self.intervals:
            step_ms, compute_ms = (1000 * each.seconds / each.steps, each.compute_ms / each.steps)
            sizes = (f"{size / 2**20:.1f}" for size in (each.allocated, each.reserved, each.driver, each.resident))
            busy = each.busy / each.looks if each.looks else math.nan
            lines.append(
                f"{each.process},{each.end_s:.3f},{each.end_step},{each.steps},{step_ms:.4f},"
                f"{each.loss / each.steps:.5f},{','.join(sizes)},{int(not each.warm)},{each.checkpoints},"
                f"{compute_ms:.4f},{busy:.1f}"
            )
        return "\n".join(lines) + "\n"


class SoakWatch:
    """Writes the steps of one process of a soak into the history of all of them, with this rank's memory: reserved by
    PyTorch's allocator on a GPU, else resident; and `utilization` of its GPU [%], if known."""

    def __init__(
        self,
        plan: SoakPlan,
        history: SoakHistory,
        device: torch.device,
        rank: int,
        beat: Beat,
        utilization: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.plan, self.history = plan, history
        self.over = False  # whether the piece's time is over; equal on all ranks
        self._device, self._rank, self._utilization = device, rank, utilization
        self._report = reporter(beat)
        self._process, self._begun_s, self._looked_s, self._checkpoints = 0, 0.0, 0.0, 0

    def begin(self, process: int) -> None:
        """Begin the piece of process number `process`, once the history has been loaded."""
        self._process, self._begun_s = process, self.history.elapsed_s
        self._looked_s = self._begun_s

    def note_checkpoint(self) -> None:
        """Note that this process begins a checkpoint, whose buffers stay whether or not it is saved.

        Looks at the memory, too: the last interval may end here without a look, at a process's first checkpoint or as
        the last one that the next process finds. Raises MemoryLimit.
        """
        if self._looked_s < self.history.elapsed_s:
            self._look(self.history.intervals[-1])
        self._checkpoints += 1

    def add(self, step: int, loss: float, seconds: float, agreed_s: float, compute_ms: float | None = None) -> None:
        """Add a step, numbered from 1; `agreed_s` are seconds of training up to it, equal on all ranks.

        Raises MemoryLimit if this rank holds more than the plan allows.
        """
        history, plan = self.history, self.plan
        last = history.intervals[-1] if history.intervals else None
        if (
            last is None
            or last.process != self._process
            or last.seconds >= plan.interval_s
            or (self._checkpoints > 0 and not last.checkpoints)
        ):
            warm = history.elapsed_s - self._begun_s >= plan.warm_up_s
            history.intervals.append(last := Interval(self._process, 0, 0, warm=warm))
        last.checkpoints = self._checkpoints
        history.elapsed_s += seconds
        last.steps += 1
        last.seconds += seconds
        last.loss += loss
        last.compute_ms += compute_ms or 0.0
        last.end_s, last.end_step = history.elapsed_s, step
        over = agreed_s >= min(self._begun_s + 60 * plan.piece_minutes, 60 * plan.minutes)
        history.pieces += over and not self.over
        self.over = over
        history.done = agreed_s >= 60 * plan.minutes
        if over or last.seconds >= plan.interval_s or history.elapsed_s - self._looked_s >= _LOOK_S:
            self._look(last)

    def _look(self, last: Interval) -> None:
        """Look at the memory since the last look, and at the GPU's utilisation."""
        history, plan = self.history, self.plan
        since, self._looked_s = self._looked_s, history.elapsed_s
        allocated, reserved, driver, resident = _memory(self._device)
        last.allocated, last.reserved = max(last.allocated, allocated), max(last.reserved, reserved)
        last.driver, last.resident = max(last.driver, driver), max(last.resident, resident)
        if (busy := self._utilization()) is not None:
            last.busy += busy
            last.looks += 1
        held = reserved or resident
        series = {MEMORY_HELD.name: held / 2**20, HOST_MEMORY.name: resident / 2**20}
        self._report.sample(last.end_step, series, self._rank)
        if held <= plan.alert_gb * GB:
            return
        over = held > plan.limit_gb * GB
        bound = f"limit_gb: {plan.limit_gb:g}" if over else f"alert_gb: {plan.alert_gb:g}"
        after = f"after {history.elapsed_s / 60:.3g} min and {last.end_step:,} steps, in process {self._process + 1}"
        text = f"rank {self._rank} holds {held / GB:.4g} GB, more than {bound}, {after}"
        if settled := history.settled(plan):
            text += f"; after the first warm-up it held {settled[0].held / GB:.3g} GB"
        if over:
            raise MemoryLimit(text)
        if history.alert_s == 0:
            self._report.warn(text)
        history.alert_s += history.elapsed_s - since


def _memory(device: torch.device) -> tuple[int, int, int, int]:
    """Bytes on a GPU: allocated (the highest since the last call), reserved, and in use as the driver counts them; and
    resident in the host's memory."""
    if device.type != "cuda":
        return 0, 0, 0, resident_bytes()
    allocated = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return allocated, torch.cuda.memory_reserved(device), total - free, resident_bytes()
