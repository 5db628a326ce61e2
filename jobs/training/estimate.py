"""Predicted memory of a training, for each of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from jobs.specs.fields import torch_dtype
from jobs.training.layout import Layout
from nsa_core.memory import estimate_model, predicts
from nsa_core.model import ModelConfig


def implementation(model: ModelConfig) -> str:
    """Name of the attention's implementation, as axes and estimates have it."""
    return "dense" if model.attention == "dense" else str(model.backend)


def estimate(model: ModelConfig, config: Mapping[str, Any]) -> int | None:
    """Predicted peak memory of one rank [bytes]; None without a prediction: compiled training, sharded weights."""
    layout = Layout.from_config(config)
    name = implementation(model)
    if config["compile"] or not predicts(name) or (layout.ranks > 1 and layout.parallel == "fsdp"):
        return None
    found = estimate_model(
        model,
        implementation=name,
        batch=layout.micro_batch,
        seq_len=config["seq_len"],
        dtype=torch.float32,
        backward=True,
        optimizer="adamw",
        device=torch.device(config["device"]),
        autocast=None if config["precision"] == "float32" else torch_dtype(config["precision"]),
    )
    # During the whole pass there are DDP's buckets, and beside them the gradients of earlier passes.
    kept = (layout.ranks > 1 and layout.parallel == "ddp") + (layout.accumulation > 1)
    return found.total + kept * found.parameters
