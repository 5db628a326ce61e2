"""A model that every rank has whole, without DistributedDataParallel: gradients are averaged where they lie.

DDP copies every gradient to a bucket and back. Here the pass is cut once, after the first blocks: as soon as the
backward pass has left the later ones, their gradients are averaged while the first blocks' are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from jobs.training.compute_clock import ComputeClock
from nsa_core.model import NSATransformer

_SHARE = 6  # one block in so many comes before the cut: their backward pass lasts about as long as the first average


class Replica:
    """Training pass of a rank, tokens and targets [B,S] to its loss, and averages of the gradients over all ranks.

    The weights are the first rank's from the start.

    Args:
        compiled: compiles a part of the pass, or gives it back as it is.
    """

    def __init__(
        self, model: NSATransformer, ranks: int, clock: ComputeClock, compiled: Callable[[Any], Callable[..., Tensor]]
    ) -> None:
        depth = max(1, len(model.blocks) // _SHARE)
        self._lower = compiled(lambda tokens: model.lower(tokens, depth))
        self._upper = compiled(lambda hidden, targets: model.upper(hidden, depth, targets))
        self._first, self._later = _parted(model, depth)
        self._ranks, self._clock = ranks, clock
        self._averaging = False
        self._under_way: list[Any] = []
        with torch.no_grad():
            for weight in model.parameters():
                dist.broadcast(weight, 0)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self._lower(tokens)
        if self._averaging and hidden.grad_fn is not None:
            # PyTorch's engine accumulates gradients as soon as they are there, before it goes on to this node.
            hidden.grad_fn.register_prehook(lambda _: self._start(self._later))
        return self._upper(hidden, targets)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context of a forward and backward pass, at whose end the gradients are averages over the ranks."""
        self._averaging = True
        try:
            yield
        finally:
            self._averaging = False
        self._clock.gradients_ready()
        self._start(self._first)
        for work in self._under_way:
            work.wait()
        self._under_way.clear()
        if not _nccl():
            for gradient in _gradients(self._first | self._later):
                gradient /= self._ranks

    def _start(self, weights: Mapping[str, Parameter]) -> None:
        """Start the sum of gradients, as one operation; NCCL averages on the way, which gloo cannot."""
        gradients = _gradients(weights)  # an exception in the block would leave the group collecting operations
        how = dist.ReduceOp.AVG if _nccl() else dist.ReduceOp.SUM
        with dist._coalescing_manager(async_ops=True) as work:  # pyright: ignore[reportPrivateImportUsage] - as FSDP2
            for gradient in gradients:
                dist.all_reduce(gradient, how)
        self._under_way.append(work)


def _parted(model: NSATransformer, depth: int) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Weights, by name, whose gradients the backward pass completes last, and the others; a tied head is the
    embedding."""
    lower = [model.embedding, *model.blocks[:depth]]
    first = {id(weight) for module in lower for weight in module.parameters()}
    weights = dict(model.named_parameters())
    return (
        {name: weight for name, weight in weights.items() if id(weight) in first},
        {name: weight for name, weight in weights.items() if id(weight) not in first},
    )


def _gradients(weights: Mapping[str, Parameter]) -> list[Tensor]:
    """Gradients of weights. Raises RuntimeError if one has none: frozen, or without a part in the loss."""
    found = {name: weight.grad for name, weight in weights.items()}
    if missing := [name for name, gradient in found.items() if gradient is None]:
        raise RuntimeError(f"parallel: replicate: {missing[0]} has no gradient; use parallel: fsdp")
    return [gradient for gradient in found.values() if gradient is not None]


def _nccl() -> bool:
    return dist.get_backend() == "nccl"
