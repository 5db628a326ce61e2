"""Linear layers that read the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ALIGNED = 8  # columns: rows of 16 bytes in half precision, which the fast matrix products want


def side_by_side(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """What each of `layers` makes of x.

    In compiled training by one product with all their weights side by side: the gradient of x is one product as well,
    in place of one a layer and their sum, and a narrow layer costs no product of its own. Elsewhere layer after layer:
    putting weights together is paid for where no compiler fuses it with their cast.
    """
    if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return [layer(x) for layer in layers]
    widths = [layer.out_features for layer in layers]
    padding = -sum(widths) % _ALIGNED
    weights = [layer.weight for layer in layers]
    if padding:
        weights.append(weights[0].new_zeros(padding, x.shape[-1]))
    parts = nn.functional.linear(x, torch.cat(weights)).split([*widths, padding], -1)
    return [_biased(part, layer.bias) for part, layer in zip(parts, layers, strict=False)]


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)
