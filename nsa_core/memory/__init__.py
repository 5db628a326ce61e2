"""Predicted memory of a configuration, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..config import NSAConfig
from ..errors import InputError
from ..functional import BRANCHES
from ..model import ModelConfig
from .ledger import Ledger, Sizes
from .model import Model
from .operator import operator_of, unpredicted


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes live at the peak.

    Attributes:
        parameters: the model's weights.
        optimizer: the optimizer's state.
        inputs: tensors that the caller holds: the operator's and the output's gradient, or tokens and targets.
        gradients: gradients of parameters, or of the operator's tensors.
        activations: outputs, and tensors kept for the backward pass; among them the loss's gradients, which are made
            with its value, until the backward pass scales them. Of a model those that its forward pass leaves.
        workspace: temporary tensors within an operation; of a model all that its forward pass frees or, with
            checkpointing, that the backward pass computes anew.
    """

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    activations: int
    workspace: int

    @property
    def extra(self) -> int:
        """Bytes that the pass adds at its peak to those allocated before it."""
        return self.gradients + self.activations + self.workspace

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.inputs + self.extra


def predicts(implementation: str) -> bool:
    """Whether the memory of `implementation` can be predicted here; "triton" needs Triton installed."""
    return unpredicted(implementation) is None


def estimate_attention(
    config: NSAConfig,
    *,
    implementation: str,
    batch: int,
    seq_len: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    backward: bool,
    device: torch.device,
) -> MemoryEstimate:
    """Memory of the operator alone: q, one k, one v and gate logits, through a sigmoid, to the output and back.

    Args:
        config: block sizes; ignored for "dense".
        implementation: "chunked", "naive", "reference", "triton" or "dense" (without gates).
        batch, seq_len, query_heads, kv_heads, head_dim, dtype: sizes and dtype of the tensors.
        backward: include the gradients of all inputs, from a given gradient of the output.
        device: decides chunks and kernels; a GPU that is not in this host counts as an A100.

    Raises:
        InputError: `predicts` is false for the implementation.
    """
    sizes = Sizes(batch, seq_len, query_heads, kv_heads, head_dim, dtype, device)
    gates = 0 if implementation == "dense" else sizes.gates
    operator, ledger = operator_of(implementation, sizes, config, compresses=True), Ledger()
    ledger.hold("activations", gates)
    operator.forward(ledger, backward)
    if backward:
        operator.backward(ledger)
        ledger.hold("gradients", gates)
    inputs = sizes.q + 2 * sizes.kv + gates + (sizes.q if backward else 0)
    return _estimate(ledger, inputs=inputs)


def estimate_model(
    config: ModelConfig,
    *,
    implementation: str,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
    backward: bool,
    optimizer: Literal["adamw"] | None,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> MemoryEstimate:
    """Memory of an NSATransformer from tokens and targets to the loss, and back to the gradients of all parameters.

    Args:
        config: the model; its checkpointing matters if `backward`, and `implementation` replaces its attention and
            backend.
        implementation: "chunked", "naive", "reference", "triton" or "dense".
        batch, seq_len: shape of the tokens.
        dtype: dtype of parameters and activations.
        backward: a training step; else a pass without gradients.
        optimizer: the optimizer whose state and step count: fused on a GPU, one parameter at a time on a CPU.
        device: as in `estimate_attention`.
        autocast: the dtype that activations are cast to, if weights are kept in a wider one.

    Raises:
        InputError: `predicts` is false for the implementation, or the model lacks a branch.
    """
    if config.branches != BRANCHES:
        raise InputError("branches", config.branches, "use all three: the memory of some alone is not predicted")
    sizes = Sizes(batch, seq_len, config.heads, config.kv_heads, config.head_dim, autocast or dtype, device)
    model, ledger = Model(config, implementation, sizes, dtype.itemsize), Ledger()
    parameters = model.parameters * dtype.itemsize
    model.forward(ledger, backward)
    if backward:
        model.backward(ledger)
    if optimizer is not None and device.type != "cuda":
        largest = config.dim * max(config.vocab_size, config.ffn_dim, config.heads * config.head_dim)
        ledger.touch(largest * dtype.itemsize)  # AdamW's denominator
    state = 0 if optimizer is None else 2 * parameters
    return _estimate(ledger, parameters=parameters, optimizer=state, inputs=2 * sizes.tokens * 8)


def _estimate(ledger: Ledger, *, parameters: int = 0, optimizer: int = 0, inputs: int = 0) -> MemoryEstimate:
    peak = ledger.peak
    return MemoryEstimate(parameters, optimizer, inputs, peak["gradients"], peak["activations"], peak["workspace"])
