"""Losses and times of a training, and which of its steps count for times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.training.soak.history import SoakHistory

RESUME_WARM_UP = 3
"""Steps after a resume that count as warm-up."""


@dataclass(frozen=True)
class Step:
    """Results of a step, equal on all ranks but for `compute_ms`.

    Attributes:
        loss: mean over the batch [nat/byte].
        norm: of the gradients of all ranks together, before clipping.
        stop: whether a rank was asked to stop.
        compute_ms: this rank's own compute time; None on a single rank and under FSDP2.
        elapsed_s: seconds of training before it was started; 0 but in a soak.
    """

    loss: float
    norm: float
    stop: bool
    compute_ms: float | None
    elapsed_s: float = 0.0


@dataclass
class Run:
    """Results of a training; a checkpoint has those up to its step.

    Attributes:
        before, after: held-out loss of the untrained model and after the last step [nat/byte].
        losses: one a step [nat/byte].
        seconds: from the end of one step to that of the next, without checkpoints.
        compute_ms: this rank's own compute time of each step, if measured; nan for steps on other ranks.
        begun: steps at which the training began (0) and was resumed, in the order of time.
        foreign: first steps that were done by other code or in another environment.
        soak: history of a soak, which stands for losses, seconds and compute_ms; None in a training of some steps.
    """

    before: float = math.nan
    after: float = math.nan
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    begun: list[int] = field(default_factory=lambda: [0])
    foreign: int = 0
    soak: SoakHistory | None = None


def first_steady(steps: int) -> int:
    """Number of first steps that count as warm-up: they compile and allocate, the optimizer's state too."""
    return max(2, steps // 10)


def is_steady(step: int, steps: int, begun: Sequence[int]) -> bool:
    """Whether a step, from 0, is no warm-up of a training of `steps` steps that began and was resumed at `begun`."""
    return step >= first_steady(steps) and not any(0 <= step - at < RESUME_WARM_UP for at in begun[1:])


def steady_steps(run: Run) -> list[int]:
    """Steps that count for times and throughput, in order: this code's, without warm-up; of a few, the last one."""
    steps = range(run.foreign, len(run.seconds))
    steady = [step for step in steps if is_steady(step, len(run.seconds), run.begun)]
    return steady or [len(run.seconds) - 1]
