# pyright: reportMissingImports=false
"""Cross entropy of a language model's head and its gradients, without ever holding all logits.

A launch computes the loss of rows of logits and their gradient; it reads a row twice, the second time from cache.
PyTorch's compiler makes three passes. The log-sum-exp is computed online as by Milakov and Gimelshein (arXiv
1805.02867), with a maximum and a sum for each lane of the tile: nothing is reduced before the row ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from ...loss import IGNORED
from ..runtime.launch import launch
from ..runtime.tiles import LOG2_E, Tile, power_of_two

_WIDEST = 8192  # logits of a tile


@triton.jit
def _cross_entropy(LOGITS, TARGETS, LOSS, DLOGITS, V, log2e, N: tl.constexpr, IGNORED: tl.constexpr):
    """Cross entropy of every row of logits, and its gradient.

    Grid: (rows). A program owns one row and loops over its V logits twice, N at a time, in base 2: for the log-sum-exp,
    then for softmax - one-hot. It writes LOSS [rows] float32 [nat] and DLOGITS [rows,V].
    LOGITS [rows,V], contiguous; TARGETS int64 [rows]; a target outside 0 .. V - 1 makes its row's loss infinite, but
    IGNORED makes loss and gradient zero.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    LOGITS += row * V
    DLOGITS += row * V
    m, l = tl.full([N], -1e30, tl.float32), tl.zeros([N], tl.float32)
    for first in range(0, V, N):
        x = tl.load(LOGITS + first + n, mask=first + n < V, other=float("-inf")).to(tl.float32) * log2e
        more = x - m
        e = tl.exp2(-tl.abs(more))  # weight of the smaller of x and the running maximum; the larger one's is 1
        l = tl.where(more > 0, l * e + 1, l + e)
        m = tl.maximum(m, x)
    top = tl.max(m, 0)
    lse = top + tl.log2(tl.sum(l * tl.exp2(m - top), 0))
    target = tl.load(TARGETS + row)
    there = (target >= 0) & (target < V)
    at_target = tl.load(LOGITS + target, mask=there, other=float("-inf")).to(tl.float32)
    tl.store(LOSS + row, tl.where(target == IGNORED, 0.0, lse / log2e - at_target))
    lse = tl.where(target == IGNORED, float("inf"), lse)
    for first in range(0, V, N):
        x = tl.load(LOGITS + first + n, mask=first + n < V, other=0.0).to(tl.float32) * log2e
        p = tl.exp2(x - lse) - (first + n == target).to(tl.float32)
        tl.store(DLOGITS + first + n, p.to(DLOGITS.dtype.element_ty), mask=first + n < V)


@custom_op("nsa_core::head_cross_entropy", mutates_args=())
def head_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of -log softmax(x · weightᵀ)[target], float32 [nat], its gradient [N,dim], and weight's [V,dim], float32.

    One node of a compiler's graph, for all chunks: one that sees them apart may take the logits of all at once, as
    Inductor has done.

    Args:
        x: [N,dim].
        weight: [V,dim], of x's dtype.
        targets: as those of `forward`, [N].
        rows: rows of x whose logits are held at a time.
    """
    total, dx, dweight = x.new_zeros((), dtype=torch.float32), torch.empty_like(x), None
    for part, wanted, dpart in zip(x.split(rows), targets.split(rows), dx.split(rows), strict=True):
        loss, dlogits = forward(part @ weight.T, wanted)
        total += loss.sum()
        if not x.is_cuda:  # where no product has another dtype than its factors
            product = (dlogits.T @ part).float()
            dweight = product if dweight is None else dweight.add_(product)
        elif dweight is None:
            dweight = torch.mm(dlogits.T, part, out_dtype=torch.float32)
        else:
            torch.addmm(dweight, dlogits.T, part, out_dtype=torch.float32, out=dweight)
        torch.mm(dlogits, weight, out=dpart)
        del dlogits  # before the next logits are taken
    assert dweight is not None, "split gives one part at least"
    return total, dx, dweight


@head_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)


def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)[target] of every row, float32 [R] [nat], and its gradient softmax - one-hot [R,V].

    Both are zero where the target is IGNORED.

    Args:
        logits: [R,V].
        targets: int64 [R]; any other outside 0 .. V - 1 makes its row's loss infinite.
    """
    logits = logits.contiguous()
    loss, dlogits = logits.new_empty(len(logits), dtype=torch.float32), torch.empty_like(logits)
    width = logits.shape[1]
    pointers = dict(LOGITS=logits, TARGETS=targets.contiguous(), LOSS=loss, DLOGITS=dlogits)
    constants = dict(N=min(_WIDEST, power_of_two(width)), IGNORED=IGNORED)
    arguments = pointers | dict(V=width, log2e=LOG2_E)
    launch(_cross_entropy, (len(logits),), arguments, constants, Tile(warps=16), stage="cross_entropy")
    return loss, dlogits
