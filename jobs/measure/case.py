"""Base class of point configurations, for the kinds that measure attention or a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch

from jobs.measure.clock import TimingPlan
from jobs.schema.axes import Axes
from jobs.specs.fields import torch_dtype
from nsa_core import NSAConfig
from nsa_core.model import ModelConfig


@dataclass(frozen=True)
class PointCase(ABC):
    """One point's configuration.

    Attributes:
        workload: "attention" alone, or the whole "model".
        implementation: a backend of the sparse operator, or a kind of dense attention.
        seq_len, batch: tokens in a sequence; number of sequences.
        dtype, device: names of the dtype and the device.
        seed: seed of the inputs.
        threads: PyTorch's CPU threads; None: PyTorch's default.
        model: the model measured, or the model whose attention is measured.
        timing: limits of the time measurement.
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
    timing: TimingPlan

    def to_config(self) -> dict[str, Any]:
        """JSON-able configuration; of the model only the fields that the workload uses, as the key depends on it."""
        config = asdict(self)
        if self.workload == "attention":
            config["model"] = {name: config["model"][name] for name in self._used()}
        return config

    @abstractmethod
    def _used(self) -> tuple[str, ...]:
        """Names of the model's fields that workload attention uses."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The case whose `to_config` gave `config`."""
        given = dict(config["model"])
        given["nsa"] = NSAConfig(**given.get("nsa", {}))
        if config["workload"] == "attention":
            model = replace(bare_model(given["heads"], given["kv_heads"], given["head_dim"]), **given)
        else:
            model = ModelConfig(**given)
        return cls(**{**config, "model": model, "timing": TimingPlan(**config["timing"])})

    def axes(self, pass_: str, **own: Any) -> Axes:
        """Axes of the point; `own` adds some."""
        return Axes(
            implementation=self.implementation,
            workload=self.workload,
            pass_=pass_,
            seq_len=self.seq_len,
            batch=self.batch,
            query_heads=self.model.heads,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            layers=self.model.layers if self.workload == "model" else None,
            dtype=self.dtype,
            device=self.device,
            **own,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    def start(self) -> torch.device:
        """Set this process's threads; return the device."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return torch.device(self.device)


def bare_model(heads: int, kv_heads: int, head_dim: int, layers: int = 1) -> ModelConfig:
    """A model for measuring its attention alone: everything else has size 1."""
    return ModelConfig(1, heads * head_dim, layers, heads, kv_heads, head_dim, ffn_dim=1)
