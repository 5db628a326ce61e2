"""Memory of the Triton kernels' operator, counted while its own host code runs, forward and backward.

No account has to be kept in step with the kernels: backends/triton.py itself runs, with autograd, on meta tensors and
with its launches left out.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..backends import triton
from ..config import NSAConfig
from ..functional import BRANCHES
from ..routes import Branch
from .allocations import Allocations
from .ledger import Ledger
from .sizes import Sizes

_CUDA_GRANULE = 512  # PyTorch's caching allocator rounds up to multiples of so many bytes
_LONGEST = 1 << 20  # most tokens that are traced; a longer call only has more equal chunks


@dataclass(frozen=True)
class Trace:
    """Bytes of one pass, beyond its operands and the output's gradient.

    Attributes:
        forward: peak during the forward.
        kept: live after it, the output included.
        released: operands not needed after it, because copies were made.
        backward: peak during the backward, `kept` included.
        gradients: gradients of q and of all keys and values.
    """

    forward: int
    kept: int
    released: int
    backward: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class Kernels:
    """Account of backends/triton.py, all branches at once."""

    sizes: Sizes
    config: NSAConfig
    compresses: bool

    @property
    def released(self) -> int:
        return self._trace(grad=True).released

    def forward(self, ledger: Ledger, grad: bool) -> None:
        trace = self._trace(grad)
        ledger.hold("activations", trace.kept)
        ledger.touch(trace.forward - trace.kept)

    def backward(self, ledger: Ledger) -> None:
        trace = self._trace(grad=True)
        ledger.hold("gradients", trace.gradients)
        ledger.touch(trace.backward - trace.kept - trace.gradients)
        ledger.release("activations", trace.kept - self.sizes.q)

    def _trace(self, grad: bool) -> Trace:
        sizes = self.sizes
        if sizes.tokens <= _LONGEST:
            return _trace_of(sizes, self.config, self.compresses, grad)
        longer, shorter = (_cut(sizes, tokens) for tokens in (_LONGEST, _LONGEST // 2))
        further = (sizes.tokens - longer.tokens) / (longer.tokens - shorter.tokens)
        ends = (astuple(_trace_of(part, self.config, self.compresses, grad)) for part in (longer, shorter))
        return Trace(*(round(far + further * (far - near)) for far, near in zip(*ends, strict=True)))


def _cut(sizes: Sizes, tokens: int) -> Sizes:
    """The same sizes with about `tokens` tokens: fewer sequences, or one shorter sequence."""
    seq_len = min(sizes.seq_len, tokens)
    return replace(sizes, batch=tokens // seq_len, seq_len=seq_len)


@lru_cache(maxsize=1024)
def _trace_of(sizes: Sizes, config: NSAConfig, compresses: bool, grad: bool) -> Trace:
    from ..kernels.runtime import launch, tiles  # need Triton

    granule = _CUDA_GRANULE if sizes.device.type == "cuda" else 1
    given, made = Allocations(granule), Allocations(granule)
    kernels = tiles.assume(tiles.capability(sizes.device))
    with torch.inference_mode(False), torch.set_grad_enabled(grad), kernels, launch.omit():
        with given:
            operands = _operands(sizes, config, compresses)
        held, edges = given.now, [get_gradient_edge(x) for x in operands.differentiated] if grad else []
        with made:
            out = operands.attend(config)
        del operands
        trace = Trace(made.peak, made.now, held - given.now)
        if not grad:
            return trace
        towards = torch.empty_like(out)
        made.peak = made.now
        with made:
            _, *gradients = torch.autograd.grad(out, edges, towards)
        return replace(trace, backward=made.peak, gradients=sum(x.nbytes for x in gradients))


@dataclass(frozen=True)
class MetaOperands:
    """Meta tensors for backends/triton.attend. `compressed`: cmp's pair is compressed already."""

    q: Tensor
    gates: Tensor
    pairs: dict[Branch, tuple[Tensor, Tensor]]
    compressed: bool

    @property
    def differentiated(self) -> list[Tensor]:
        """Gates, q, and each distinct key and value."""
        tensors = self.gates, self.q, *(x for pair in self.pairs.values() for x in pair)
        return list({id(x): x for x in tensors}.values())

    def attend(self, config: NSAConfig) -> Tensor:
        compressed = self.pairs["cmp"] if self.compressed else (None, None)
        scale = self.q.shape[-1] ** -0.5
        return triton.attend(self.q, self.pairs, compressed, self.gates, config, BRANCHES, 0, scale)


def _operands(sizes: Sizes, config: NSAConfig, compresses: bool) -> MetaOperands:
    """Operands of the operator alone; or as NativeSparseAttention gives them, values being views of one projection."""
    kv = sizes.batch, sizes.seq_len, sizes.kv_heads, sizes.dim
    anchor = torch.empty((), dtype=sizes.dtype, device="meta", requires_grad=True)

    def tensor(*shape: int) -> Tensor:
        return anchor.expand(shape).clone()  # no leaf: autograd holds leaves, needed or not

    q, gates = (tensor(sizes.batch, sizes.seq_len, sizes.heads, width) for width in (sizes.dim, 3))
    if compresses:
        pair = tensor(*kv), tensor(*kv)
        return MetaOperands(q, gates, {"cmp": pair, "slc": pair, "win": pair}, compressed=False)
    tokens = config.cmp_tokens(sizes.seq_len)
    k_cmp, v_cmp = (tensor(sizes.batch, tokens, *kv[2:]) for _ in range(2))
    _, v_slc, v_win = tensor(*kv[:2], 3, *kv[2:]).unbind(2)
    pairs: dict[Branch, tuple[Tensor, Tensor]] = {
        "cmp": (k_cmp, v_cmp), "slc": (tensor(*kv), v_slc), "win": (tensor(*kv), v_win),
    }  # fmt: skip
    return MetaOperands(q, gates, pairs, compressed=True)
