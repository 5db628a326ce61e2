"""Model FLOPs of a training against the published peak of its ranks' GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.measure.flops import training_flops_per_token
from jobs.schema.peaks import BF16_PEAKS
from jobs.training.layout import Layout
from nsa_core.model import ModelConfig


@dataclass(frozen=True)
class ModelFlops:
    """Work of a token, and what the GPUs could do at most.

    Attributes:
        per_token: FLOPs of a token.
        peak: of each rank's GPU [FLOP/s].
        ranks: number of GPUs.
    """

    per_token: float
    peak: float
    ranks: int

    @classmethod
    def of(cls, model: ModelConfig, config: Mapping[str, Any], gpu: str) -> ModelFlops | None:
        """The figures of a point's training on GPUs of this name; None where no peak is known."""
        if gpu not in BF16_PEAKS or config["precision"] != "bfloat16":
            return None
        per_token = training_flops_per_token(model, config["seq_len"])
        return cls(per_token, BF16_PEAKS[gpu], Layout.from_config(config).ranks)

    def utilization(self, throughput: float) -> float:
        """Share of the peak of all ranks' GPUs [%] at a throughput of all ranks [tok/s]."""
        return 100 * throughput * self.per_token / (self.peak * self.ranks)

    @property
    def method(self) -> str:
        gpus = f" on each of {self.ranks} GPUs" if self.ranks > 1 else ""
        return f"{self.per_token:.4g} FLOPs a token, {self.peak:.4g} a second{gpus}"
