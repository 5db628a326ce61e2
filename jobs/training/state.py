"""A training's state and its results so far: what a checkpoint stores; and which steps count for times."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from jobs.training.data.base import Batches
from jobs.training.soak import SoakHistory
from nsa_core.model import NSATransformer

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


@dataclass
class TrainingState:
    """State after `step` steps; a checkpoint stores it, and a training that loads it goes on with the next step.

    Attributes:
        model: under FSDP2 with sharded parameters.
        optimizer: with its state; the learning rate follows from `step`.
        batches: the position in the data and its random generator; equal on all ranks.
        step: number of steps done.
    """

    model: NSATransformer
    optimizer: Optimizer
    batches: Batches
    step: int = 0

    def tensors(self) -> dict[str, Any]:
        """Weights and the optimizer's state by parameter: the tensors themselves, sharded ones as DTensor."""
        from torch.distributed.checkpoint.state_dict import get_state_dict  # long to import, and few trainings need it

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_tensors(self, saved: Mapping[str, Any]) -> None:
        """Take over what `tensors` gave, read again."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """States of this process's random generators, uint8."""
    found = {"cpu": torch.get_rng_state()}
    return found | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


def set_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put this process's random generators into the states that `generators` gave."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def packed(value: Any) -> bytes:
    """A nested value with tensors as bytes: one item of a checkpoint, whatever its shape is when it is read."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Value that `packed` took. Unpickles tensors and plain values only."""
    return torch.load(io.BytesIO(data), weights_only=True)
