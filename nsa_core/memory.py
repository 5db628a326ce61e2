"""What a configuration will need, tensor by tensor, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ._footprints import footprint, unpredicted
from ._footprints.ledger import Ledger
from ._footprints.model import Model
from ._footprints.sizes import Sizes
from .config import NSAConfig
from .model import ModelConfig


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that live at the highest moment.

    Attributes:
        parameters: the model's weights.
        optimizer: its state.
        inputs: what the caller holds: the operator's tensors and the output's gradient, or tokens and targets.
        gradients: of parameters, or of the operator's tensors.
        activations: outputs, and what is kept for the backward pass.
        workspace: what lives within an operation.
    """

    parameters: int
    optimizer: int
    inputs: int
    gradients: int
    activations: int
    workspace: int

    @property
    def extra(self) -> int:
        """What the pass allocates at its peak beyond what was there before it."""
        return self.gradients + self.activations + self.workspace

    @property
    def total(self) -> int:
        """Everything."""
        return self.parameters + self.optimizer + self.inputs + self.extra


def predicts(implementation: str) -> bool:
    """Whether the memory of `implementation` can be estimated here: of "triton" only where Triton is installed."""
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
    """The operator alone: q, one k, one v and gate logits, through a sigmoid, to the output, and back.

    Args:
        config: block sizes; without a meaning for "dense".
        implementation: "chunked", "naive", "reference", "triton" or "dense" (without gates).
        batch, seq_len, query_heads, kv_heads, head_dim, dtype: of the tensors.
        backward: the gradients of all inputs, towards a given gradient of the output.
        device: chunks and kernels differ with it; of a GPU that is not here, they are those of an A100.

    Raises:
        InputError: an implementation that `predicts` does not know.
    """
    sizes = Sizes(batch, seq_len, query_heads, kv_heads, head_dim, dtype, device)
    gates = 0 if implementation == "dense" else sizes.gates
    operator, ledger = footprint(implementation, sizes, config, compresses=True), Ledger()
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
    """NSATransformer from tokens and targets to the loss, and back to the gradients of all parameters.

    Args:
        config: the model; its checkpointing counts where `backward` is set, its attention and backend give way to
            `implementation`.
        implementation: "chunked", "naive", "reference", "triton" or "dense".
        batch, seq_len: of tokens.
        dtype: of parameters and activations.
        backward: the pass is a training step's; else it runs without gradients.
        optimizer: whose state exists, and whose step follows: fused on a GPU, one parameter at a time on a CPU.
        device: as of estimate_attention.
        autocast: the dtype that activations are cast to, where weights are kept in a wider one.

    Raises:
        InputError: an implementation that `predicts` does not know.
    """
    sizes = Sizes(batch, seq_len, config.heads, config.kv_heads, config.head_dim, autocast or dtype, device)
    model, ledger = Model(config, implementation, sizes, dtype.itemsize), Ledger()
    parameters = model.parameters * dtype.itemsize
    model.forward(ledger, backward)
    if backward:
        model.backward(ledger)
    if optimizer is not None and device.type != "cuda":
        ledger.touch(model.largest_parameter * dtype.itemsize)  # its denominator
    state = 0 if optimizer is None else 2 * parameters
    return _estimate(ledger, parameters=parameters, optimizer=state, inputs=2 * sizes.tokens * 8)


def _estimate(ledger: Ledger, *, parameters: int = 0, optimizer: int = 0, inputs: int = 0) -> MemoryEstimate:
    peak = ledger.peak
    return MemoryEstimate(parameters, optimizer, inputs, peak["gradients"], peak["activations"], peak["workspace"])
