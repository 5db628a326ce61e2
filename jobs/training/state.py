"""Everything that a training continues from."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from jobs.training.data.base import Batches
from nsa_core.model import NSATransformer


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
