"""Division of a training step, batch = micro-batch × ranks × accumulation, and the memory that a rank needs for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from jobs.specs.fields import torch_dtype
from nsa_core.memory import estimate_model, predicts
from nsa_core.model import ModelConfig

Parallel = Literal["ddp", "replicate", "fsdp"]


@dataclass(frozen=True)
class Layout:
    """Division of a step's batch over ranks and passes.

    Attributes:
        micro_batch: sequences of one rank in one forward and backward pass.
        ranks: processes, each with its own device.
        accumulation: passes of each rank whose gradients make one step.
        parallel: "ddp": every rank has all weights, by PyTorch's DistributedDataParallel; "replicate": the same, with
            gradients averaged where they lie; "fsdp": weights, gradients and optimizer state are sharded.
        gradient_compression: dtype in which gradients are summed over ranks; None: that of the weights.
        bucket_mb: size of DDP's buckets of gradients [MB, 2^20 bytes]; None: PyTorch's.
    """

    micro_batch: int
    ranks: int = 1
    accumulation: int = 1
    parallel: Parallel = "ddp"
    gradient_compression: Literal["bf16"] | None = None
    bucket_mb: float | None = None

    @property
    def batch(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.micro_batch * self.ranks * self.accumulation

    def to_config(self) -> dict[str, Any]:
        """Section of a point's configuration; {} for one pass on one rank, so that its key stays as it was."""
        return {"ranks": asdict(self)} if self.ranks > 1 or self.accumulation > 1 else {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layout:
        """Layout of a point's configuration."""
        section = config.get("ranks")
        return cls(config["batch"]) if section is None else cls(**section)


def divided(batch: int, ranks: int, micro_batch: int | None) -> tuple[int, int]:
    """Micro-batch and accumulation of a batch; without a micro-batch each rank takes its part in one pass.

    Raises:
        ValueError: the batch does not divide; the message shows the arithmetic and the nearest batches that do.
    """
    unit = ranks * (micro_batch or 1)
    if batch % unit:
        below, above = batch - batch % unit, batch - batch % unit + unit
        given = f"micro_batch {micro_batch}" if micro_batch else "a micro_batch"
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"batch: {batch}: is not {given} × ranks {ranks} × accumulation; use {nearest}")
    return (micro_batch, batch // unit) if micro_batch else (batch // ranks, 1)


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
