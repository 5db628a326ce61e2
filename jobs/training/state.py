"""A training's state and its results so far: what a checkpoint stores; and which steps count for times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.optim import Optimizer

from jobs.training.data.corpus import Batches
from jobs.training.probe import Probe
from jobs.training.soak import SoakHistory
from nsa_core.model import NSATransformer

RESUME_WARM_UP = 3  # steps after a resume that count as warm-up


@dataclass
class TrainingState:
    """State after `step` steps; a checkpoint stores it, and a training that loads it goes on with the next step."""

    model: NSATransformer  # under FSDP2 with sharded parameters
    optimizer: Optimizer  # with its state; the learning rate follows from `step`
    batches: Batches  # the position in the data; equal on all ranks
    step: int = 0


@dataclass
class Run:
    """Results of a training; a checkpoint has those up to its step."""

    before: float = math.nan  # held-out loss of the untrained model [nat/byte]
    after: float = math.nan  # held-out loss after the last step
    losses: list[float] = field(default_factory=list)  # one a step [nat/byte]
    seconds: list[float] = field(default_factory=list)  # from the end of a step to that of the next, no checkpoints
    compute_ms: list[float] = field(default_factory=list)  # this rank's own, if measured; nan of steps on other ranks
    begun: list[int] = field(default_factory=lambda: [0])  # steps at which it began and was resumed
    foreign: int = 0  # first steps that were done by other code or in another environment
    probe: Probe | None = None  # of the trained model, if asked for
    soak: SoakHistory | None = None  # of a soak, instead of losses, seconds and compute_ms

    def steady_steps(self) -> list[int]:
        """Steps that count for times and throughput, in order: this code's, without warm-up; of a few, the last one."""
        count = len(self.seconds)
        return [step for step in range(self.foreign, count) if is_steady(step, count, self.begun)] or [count - 1]


def is_steady(step: int, steps: int, begun: Sequence[int]) -> bool:
    """Whether a step, from 0, is no warm-up of a training of `steps` steps that began and was resumed at `begun`."""
    return step >= first_steady(steps) and not any(0 <= step - at < RESUME_WARM_UP for at in begun[1:])


def first_steady(steps: int) -> int:
    """Number of first steps that count as warm-up: they compile and allocate, the optimizer's state too."""
    return max(2, steps // 10)
