"""The history of a soak on one rank: memory, step time and loss over hours, thinned, through all of its processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

INTERVALS = 1000
"""Intervals that a whole soak is divided into."""

WARM_UP_S = 60.0
"""Longest warm-up of a process [s of training]; of shorter pieces it is their first tenth."""

GB = 10**9

_COLUMNS = (  # of the table
    *("process", "end_s", "end_step", "steps", "step_ms", "loss"),
    *("allocated_mib", "reserved_mib", "resident_mib", "warm_up", "after_checkpoint"),
    *("compute_ms", "busy"),
)


@dataclass(frozen=True)
class SoakPlan:
    """Times and bounds of a soak.

    Attributes:
        minutes: of training, over all pieces.
        piece_minutes: of training after which a process ends, and a fresh one goes on.
        alert_gb, limit_gb: memory that a rank holds [GB]: beyond it a warning, the end.
    """

    minutes: float
    piece_minutes: float
    alert_gb: float
    limit_gb: float

    @property
    def interval_s(self) -> float:
        """Seconds of an interval of the history."""
        return 60 * self.minutes / INTERVALS

    @property
    def warm_up_s(self) -> float:
        """Seconds of each process that do not count for slopes and times."""
        return min(WARM_UP_S, 6 * self.piece_minutes)


@dataclass
class Interval:
    """Steps in a row.

    Attributes:
        process: number of the process among those that trained, from 0.
        end_s: seconds of training at its end.
        end_step: steps done at its end.
        steps, seconds: number and time of its steps.
        loss: sum over its steps [nat/byte].
        allocated, reserved: bytes on the GPU, the highest; 0 on a CPU.
        resident: bytes of the process in the host's memory, the highest.
        warm: whether it begins after the warm-up of its process.
        after_checkpoint: whether its process had begun a checkpoint: the first one leaves buffers behind, saved or not.
        compute_ms: sum of the rank's own compute times; 0 where they are unknown.
        busy: sum of the utilisation of its GPU in `looks` looks [%].
    """

    process: int
    end_s: float
    end_step: int
    steps: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    allocated: int = 0
    reserved: int = 0
    resident: int = 0
    warm: bool = False
    after_checkpoint: bool = False
    compute_ms: float = 0.0
    busy: float = 0.0
    looks: int = 0

    @property
    def memory_level(self) -> int:
        """Number of the level at which memory would stay but for growth: each process has two, parted by its first
        checkpoint."""
        return 2 * self.process + self.after_checkpoint

    @property
    def held(self) -> int:
        """Bytes that the process holds: of the GPU if it uses one, else of the host's memory."""
        return self.reserved or self.resident

    @property
    def hours(self) -> float:
        """Hours of training until its middle."""
        return (self.end_s - self.seconds / 2) / 3600


@dataclass
class SoakHistory:
    """Findings of a soak up to a step; kept in checkpoints, so that each process goes on with the whole.

    Attributes:
        elapsed_s: seconds of training, of all processes.
        alert_s: those above the alert.
        pieces: processes that reached the end of their piece.
        done: whether the whole time has been trained.
        intervals: in order; the last one may still grow.
    """

    elapsed_s: float = 0.0
    alert_s: float = 0.0
    pieces: int = 0
    done: bool = False
    intervals: list[Interval] = field(default_factory=list)

    def shared(self) -> dict[str, Any]:
        """Values in which ranks must agree."""
        return {"elapsed_s": self.elapsed_s, "pieces": self.pieces, "done": self.done}

    def own(self) -> dict[str, Any]:
        """Values of this rank, as plain numbers."""
        return {"alert_s": self.alert_s, "intervals": [astuple(interval) for interval in self.intervals]}

    def take_over(self, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Go on from what `shared` and `own` gave."""
        self.elapsed_s, self.pieces, self.done = shared["elapsed_s"], shared["pieces"], shared["done"]
        self.alert_s = own["alert_s"]
        self.intervals = [Interval(*row) for row in own["intervals"]]

    def settled(self, plan: SoakPlan) -> Iterator[Interval]:
        """Intervals that count for slopes and times: without warm-up, and not cut short by their memory level's end."""
        return (i for i in self.intervals if i.warm and i.seconds >= plan.interval_s / 2)

    def to_csv(self) -> str:
        """A table of all intervals: seconds, MiB, nat/byte, ms of a step, %."""
        lines = [",".join(_COLUMNS)]
        for each in self.intervals:
            times = f"{each.end_s:.3f},{each.end_step},{each.steps},{1000 * each.seconds / each.steps:.4f}"
            sizes = ",".join(f"{size / 2**20:.1f}" for size in (each.allocated, each.reserved, each.resident))
            flags = f"{int(not each.warm)},{int(each.after_checkpoint)}"
            own = f"{each.compute_ms / each.steps:.4f},{each.busy / each.looks if each.looks else float('nan'):.1f}"
            lines.append(f"{each.process},{times},{each.loss / each.steps:.5f},{sizes},{flags},{own}")
        return "\n".join(lines) + "\n"
