"""Cross entropy of a language model's output head, a chunk of logits at a time."""

from typing import Any

import torch
from torch import Tensor

from ._decorators import undifferentiable
from ._inputs import autocast_dtype, without_autocast
from .projections import in_compiled_training

IGNORED = -100  # a target without a part in the loss, as for torch.nn.functional.cross_entropy


def head_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Mean of -log softmax(x · weightᵀ)[targets], float32 (float64 for float64) [nat], differentiable in x and weight.

    Rows whose target is IGNORED have no part in it; without any other it is 0.

    With gradients enabled they are computed together with the values, from the same logits; the backward pass only
    scales them. Only `rows` rows of logits exist at a time.

    Args:
        x: [N,dim]. Under autocast products are in its dtype.
        weight: [V,dim].
        targets: [N], whole numbers in 0 .. V - 1, or IGNORED; any other value makes the result infinite.
        rows: rows of x whose logits are held at a time.
    """
    dtype, fused = autocast_dtype(x) or x.dtype, in_compiled_training(x)
    counted = (targets != IGNORED).sum().clamp(min=1)
    with without_autocast(x):
        if torch.is_grad_enabled():
            total = _SummedCrossEntropy.apply(x, weight, targets, dtype, rows, fused)
            assert isinstance(total, Tensor)
            return total / counted
        x, weight = x.to(dtype), weight.to(dtype)
        parts = zip(x.split(rows), targets.split(rows), strict=True)
        return torch.stack([_summed(part, weight, wanted)[0] for part, wanted in parts]).sum() / counted


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, rows: int, fused: bool
    ) -> Tensor:
        cast = weight.to(dtype)
        if fused:
            from .kernels.training.cross_entropy import head_cross_entropy as by_kernel  # needs Triton

            total, dx, dweight = by_kernel(x.to(dtype).contiguous(), cast, targets, rows)
        else:
            total, dx, dweight = _in_chunks(x, cast, targets, rows)
        ctx.save_for_backward(dx, dweight)
        ctx.dtypes = x.dtype, weight.dtype
        return total

    @staticmethod
    @undifferentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dx, dweight), (of_x, of_weight) = ctx.saved_tensors, ctx.dtypes
        return (dx * dtotal).to(of_x), (dweight * dtotal).to(of_weight), None, None, None, None


def _in_chunks(x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, at least float32, and its gradients: of x in weight's dtype, and of weight, at least float32."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x.device)
    dx: list[Tensor] = []
    dweight = torch.zeros_like(weight, dtype=wide)
    for part, wanted in zip(x.split(rows), targets.split(rows), strict=True):
        cast = part.to(weight.dtype)
        loss, lse, logits, is_target = _summed(cast, weight, wanted)
        dlogits = logits.sub_(lse).exp_().add_(is_target, alpha=-1).to(cast.dtype)  # softmax, less one at the target
        del logits, is_target
        total = total + loss
        dweight += dlogits.T @ cast
        dx.append(dlogits @ weight)
        del dlogits  # before the next logits are taken
    return total, torch.cat(dx), dweight


def _summed(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum of the cross entropies of the rows that count, and what its gradient is made of.

    The targets' logits come from a pass over all logits, which a compiler fuses with the log-sum-exp's: gathered by
    index they would be read later, and all chunks' logits would live until then. A row without a target has -inf.

    Returns:
        The sum; the log-sum-exp [R,1] of all rows, infinite where a row does not count; the logits [R,V], at least
        float32; and a mask [R,V] of the targets' places.
    """
    logits = (x @ weight.T).to(torch.promote_types(x.dtype, torch.float32))
    is_target = torch.arange(logits.shape[1], device=x.device) == targets[:, None]
    lse, counted = torch.logsumexp(logits, -1, keepdim=True), targets != IGNORED
    losses = lse[:, 0] - torch.where(is_target, logits, -torch.inf).amax(-1)
    return torch.where(counted, losses, 0).sum(), lse.masked_fill(~counted[:, None], torch.inf), logits, is_target
