"""Linear layers that read the same input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ._inputs import autocast_dtype
from .backends import triton

_ALIGNED = 8  # columns: fast matrix products need rows of 16 bytes, 8 numbers of half precision


def side_by_side(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """Outputs of `layers` for their common input x.

    Compiled training uses one product with all weights side by side: the gradient of x is then one product, too, in
    place of one per layer and their sum, and a narrow layer costs no product of its own. Elsewhere each layer runs by
    itself: concatenating the weights costs time unless a compiler fuses it with their cast.
    """
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return [layer(x) for layer in layers]
    joined, widths = product(x, layers), [layer.out_features for layer in layers]
    parts = joined.split([*widths, joined.shape[-1] - sum(widths)], -1)
    biases = [layer.bias for layer in layers]
    return [x if b is None else x + b.to(x.dtype) for x, b in zip(parts, biases, strict=False)]


def product(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """x times the weights of `layers` side by side [..,outputs], with columns of zeros to a multiple of 8."""
    weights = [layer.weight for layer in layers]
    if padding := -sum(len(weight) for weight in weights) % _ALIGNED:
        weights.append(weights[0].new_zeros(padding, x.shape[-1]))
    return nn.functional.linear(x, torch.cat(weights))


def in_compiled_training(x: Tensor) -> bool:
    """Whether this is training compiled for a GPU in half precision, for which there are kernels around attention."""
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled() and x.is_cuda):
        return False
    dtype = autocast_dtype(x) or x.dtype
    return dtype.itemsize == 2 and triton.unavailable(x.device, dtype) is None
