"""What the points of several kinds of job are configured by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from jobs._fields import torch_dtype
from jobs.measure.clock import Plan
from nsa_core import NSAConfig
from nsa_core.model import ModelConfig


@dataclass(frozen=True)
class PointCase(ABC):
    """One point's configuration, as measured.

    Attributes:
        workload: "attention" alone, or the whole "model".
        implementation: a backend of the sparse operator, or a kind of dense attention.
        seq_len, batch: tokens of a sequence; sequences.
        dtype, device: by name.
        seed: of the inputs.
        threads: that PyTorch computes with; None: its own choice.
        model: what is measured, or whose attention.
        timing: how long.
    """

    workload: str
    implementation: str
    seq_len: int
    batch: int
    dtype: str
    device: str
    seed: int
    threads: int | None
    model: ModelConfig
    timing: Plan

    def to_config(self) -> dict[str, Any]:
        """As JSON; of the model, only what the workload uses, so that a key changes with nothing else."""
        config = asdict(self)
        if self.workload == "attention":
            config["model"] = {name: config["model"][name] for name in self._used()}
        return config

    @abstractmethod
    def _used(self) -> tuple[str, ...]:
        """Fields of the model that attention alone uses."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """What `to_config` was called of."""
        given = dict(config["model"])
        given["nsa"] = NSAConfig(**given.get("nsa", {}))
        if config["workload"] == "attention":
            model = replace(bare_model(given["heads"], given["kv_heads"], given["head_dim"]), **given)
        else:
            model = ModelConfig(**given)
        return cls(**{**config, "model": model, "timing": Plan(**config["timing"])})

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    def start(self) -> torch.device:
        """Its device, with the process set to its threads."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return torch.device(self.device)


def bare_model(heads: int, kv_heads: int, head_dim: int, layers: int = 1) -> ModelConfig:
    """A model of which nothing but the attention is used."""
    return ModelConfig(1, heads * head_dim, layers, heads, kv_heads, head_dim, ffn_dim=1)
