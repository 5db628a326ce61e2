"""Token embedding whose gradient is summed in a fixed order in compiled training, too.

PyTorch's compiler adds up an embedding's gradient by atomic additions, so that a training would not repeat its own
bits. PyTorch's own operator sorts the tokens first; here the compiler takes it as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn.functional import embedding

__all__ = ["TokenEmbedding"]


class TokenEmbedding(nn.Embedding):
    """Rows of the weight [V,D] for tokens [..]: [..,D]."""

    def forward(self, tokens: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _operator(tokens, self.weight)
        return embedding(tokens, self.weight)


@custom_op("nsa_core::embed", mutates_args=())
def _operator(tokens: Tensor, weight: Tensor) -> Tensor:
    return embedding(tokens, weight)


@custom_op("nsa_core::embed_backward", mutates_args=())
def _backward_operator(dout: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Gradient [count,D] of the weight."""
    return torch.ops.aten.embedding_dense_backward(dout, tokens, count, -1, False)


@_operator.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(*tokens.shape, weight.shape[1])


@_backward_operator.register_fake
def _(dout: Tensor, tokens: Tensor, count: int) -> Tensor:
    return dout.new_empty(count, dout.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.count = len(weight)
    ctx.save_for_backward(tokens)


def _grad(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
    (tokens,) = ctx.saved_tensors
    return None, _backward_operator(dout, tokens, ctx.count)


_operator.register_autograd(_grad, setup_context=_keep)
