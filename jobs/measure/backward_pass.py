"""A model's backward pass: watched layer by layer, repeated in a layer, in anomaly mode; proof of its branches."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jobs.measure.check import HeadShape, WrongResult
from jobs.measure.isolation import trace_branch
from jobs.measure.layers import LayerWatch, Watched
from jobs.measure.model_pass import ModelPass, model_of, pass_case
from jobs.schema.point import FAILURE_FILES, Beat
from jobs.specs.fields import torch_dtype
from nsa_core.functional import BRANCHES


class BackwardPass(ModelPass):
    """A model's forward and backward pass, with repeated attention and in anomaly mode if the configuration says so."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(pass_case(config))
        self._anomaly = config["anomaly"]
        self._layers = list(self.model.blocks)
        drill = config["drill"]
        self._hang_in = drill["hang_in_layer"] if drill and config["seq_len"] >= drill["from_length"] else None
        if config["repeats"] > 1:
            for block in self._layers:
                block.attention = Repeated(block.get_submodule("attention"), config["repeats"])

    def forward(self) -> Tensor:
        with torch.autograd.set_detect_anomaly(self._anomaly):
            return super().forward()

    def _backward(self, loss: Tensor) -> None:
        with torch.autograd.set_detect_anomaly(self._anomaly):
            super()._backward(loss)

    def call(self) -> Tensor:
        """The pass without the gradients of an earlier one."""
        self.clear()
        return self.run()

    def watched(self, beat: Beat) -> Watched:
        """Run the pass once, watched layer by layer. Raises BrokenGradient, PassFailed."""
        watch = LayerWatch(self._layers, self.device, beat, failure_folder(), self._hang_in)
        return watch.run(self.forward, self._backward)


class Repeated(nn.Module):
    """Attention that a layer runs several times, each time on the sum of its input and its output."""

    def __init__(self, attention: nn.Module, times: int) -> None:
        super().__init__()
        self.attention, self.times = attention, times

    def forward(self, x: Tensor, cache: None = None) -> Tensor:
        for _ in range(self.times):
            x = x + self.attention(x)
        return x


def branch_trace(config: Mapping[str, Any]) -> dict[str, str]:
    """The trace of a branch alone, as a file; {} for all. Raises WrongResult."""
    model = model_of(config)
    if model.branches == BRANCHES:
        return {}
    shape = HeadShape.of(model)
    settings = replace(model.nsa, compress="mean"), shape, torch_dtype(config["precision"])
    device = torch.device(config["device"])
    text = trace_branch(model.branches[0], config["implementation"], *settings, device, backward=True)
    return {"trace.txt": text}


def check_route(config: Mapping[str, Any], route: Mapping[str, str]) -> None:
    """Raise WrongResult if the model ran other branches than its own."""
    own = set(model_of(config).branches)
    if own != set(route) - {"select"}:
        raise WrongResult(f"{config['implementation']}: a model of {', '.join(sorted(own))} ran {', '.join(route)}")


def failure_folder() -> Path:
    return Path(tempfile.gettempdir()) / FAILURE_FILES
