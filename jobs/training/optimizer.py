"""The optimizer and its schedule."""

from __future__ import annotations

import math

import torch
from pydantic import Field

from jobs.specs.spec import Strict


class OptimizerSpec(Strict):
    """AdamW with a linear warm-up and a cosine decay."""

    learning_rate: float = Field(default=3e-3, gt=0, description="at the end of the warm-up")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="of the learning rate, at the last step")
    warmup_steps: int = Field(default=10, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, description="of matrices; vectors are not decayed")
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    grad_clip: float = Field(default=1.0, gt=0, description="highest norm of all gradients together")


def check_warm_up(spec: OptimizerSpec, steps: int) -> None:
    """Raise ValueError, in the words of a spec's mistake, if the warm-up does not end before the last step."""
    if spec.warmup_steps >= steps:
        raise ValueError(
            f"optimizer.warmup_steps: {spec.warmup_steps}: must end before the last of the {steps} steps; use at most "
            f"{steps - 1}"
        )


def new_optimizer(model: torch.nn.Module, spec: OptimizerSpec, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the model's parameters, which may be sharded."""
    weights = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.ndim >= 2], "weight_decay": spec.weight_decay},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        fused=device.type == "cuda",
    )


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of a step from 0: linear warm-up from near 0, a cosine decay to final_fraction up to step steps-1.

    Later ones keep the last rate.
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = min(1.0, (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return spec.learning_rate * (spec.final_fraction + (1 - spec.final_fraction) * cosine)
