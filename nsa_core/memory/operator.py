"""Memory that an attention operator allocates, forward and backward.

No account has to be kept in step with the backends: the operator itself runs, with autograd, on meta tensors, which
have shapes but no memory, and its allocations are counted; the Triton kernels' launches are left out. Only PyTorch's
fused dense attention, whose kernels allocate where nobody sees it, is written down.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._inputs import Operands
from ..backends import BACKENDS, triton
from ..backends.chunks import assume
from ..config import NSAConfig
from ..errors import InputError
from ..functional import BRANCHES, _attend
from .ledger import Ledger, Sizes

IMPLEMENTATIONS = ("chunked", "naive", "reference", "triton", "dense")

_CUDA_GRANULE = 512  # PyTorch's caching allocator rounds up to multiples of so many bytes
_LONGEST = 1 << 20  # most tokens of the kernels that are traced; a longer call only has more equal chunks


class Operator(Protocol):
    """One implementation's memory.

    Attributes:
        released: bytes of a layer's keys and values that the backward does not need, because the operator has copies.
    """

    @property
    def released(self) -> int: ...

    def forward(self, ledger: Ledger, grad: bool) -> None:
        """Account for a forward: holds the output (as activation) and, with `grad`, the backward's tensors."""
        ...

    def backward(self, ledger: Ledger) -> None:
        """Account for a backward: releases its tensors except for the output, holds gradients of q, k and v."""
        ...


def unpredicted(implementation: str) -> str | None:
    """Reason why the memory of `implementation` cannot be predicted here, with the fix; None if it can."""
    if implementation not in IMPLEMENTATIONS:
        return f"use one of {', '.join(IMPLEMENTATIONS)}"
    if implementation == "triton":
        return triton.unavailable(torch.device("cuda"), torch.bfloat16)
    return None


def operator_of(implementation: str, sizes: Sizes, config: NSAConfig, *, compresses: bool) -> Operator:
    """Memory of `implementation`.

    Args:
        compresses: the operator compresses one k and one v for all branches; else a layer gives it three of each, the
            compressed ones among them.

    Raises:
        InputError: `unpredicted` has a reason against it.
    """
    if (reason := unpredicted(implementation)) is not None:
        raise InputError("implementation", repr(implementation), reason)
    return Dense(sizes) if implementation == "dense" else Traced(implementation, sizes, config, compresses)


@dataclass(frozen=True)
class Dense:
    """scaled_dot_product_attention's fused kernels: beside the output only lse is kept."""

    sizes: Sizes
    released = 0

    @property
    def _lse(self) -> int:
        return self.sizes.tokens * self.sizes.heads * 4

    def forward(self, ledger: Ledger, grad: bool) -> None:
        ledger.hold("activations", self.sizes.q + self._lse)
        if self.sizes.device.type == "cpu":
            rows, keys = self._cpu_tile()
            ledger.touch(torch.get_num_threads() * rows * (keys + 2 + self.sizes.dim) * 4)
        if not grad:
            ledger.release("activations", self._lse)

    def backward(self, ledger: Ledger) -> None:
        s = self.sizes
        ledger.hold("gradients", s.q + 2 * s.kv)
        if s.device.type == "cpu":
            rows, keys = self._cpu_tile()
            ledger.touch(torch.get_num_threads() * 2 * rows * keys * 4)
        else:  # the flash kernel sums dq in float32, and dk, dv of every query head before those of the group
            grouped = 2 * s.q if s.heads != s.kv_heads else 0
            ledger.touch(s.tokens * s.heads * s.dim * 4 + grouped + self._lse)
        ledger.release("activations", self._lse)

    def _cpu_tile(self) -> tuple[int, int]:
        """Rows and keys of a thread's tile in PyTorch's FlashAttentionKernel.cpp."""
        length = self.sizes.seq_len
        rows = 256 if length >= 768 else 64 if length >= 192 else 32
        return min(rows, length), min(512, length)


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
class Traced:
    """A backend, all branches together."""

    implementation: str
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
        sizes, trace = self.sizes, partial(_trace, self.implementation, self.config, self.compresses, grad)
        if self.implementation != "triton" or sizes.tokens <= _LONGEST:
            return trace(sizes)
        longer, shorter = (_cut(sizes, tokens) for tokens in (_LONGEST, _LONGEST // 2))
        further = (sizes.tokens - longer.tokens) / (longer.tokens - shorter.tokens)
        ends = (astuple(trace(part)) for part in (longer, shorter))
        return Trace(*(round(far + further * (far - near)) for far, near in zip(*ends, strict=True)))


def _cut(sizes: Sizes, tokens: int) -> Sizes:
    """The same sizes with about `tokens` tokens: fewer sequences, or one shorter sequence."""
    seq_len = min(sizes.seq_len, tokens)
    return replace(sizes, batch=tokens // seq_len, seq_len=seq_len)


@lru_cache(maxsize=1024)
def _trace(implementation: str, config: NSAConfig, compresses: bool, grad: bool, sizes: Sizes) -> Trace:
    granule = _CUDA_GRANULE if sizes.device.type == "cuda" else 1
    given, made = Allocations(granule), Allocations(granule)
    backends = dict.fromkeys((*BRANCHES, "select"), BACKENDS[implementation])
    with torch.inference_mode(False), torch.set_grad_enabled(grad), assume(sizes.device.type), ExitStack() as stack:
        if implementation == "triton":
            from ..kernels.runtime import launch, tiles  # need Triton

            stack.enter_context(tiles.assume(tiles.capability(sizes.device)))
            stack.enter_context(launch.omit())
        with given:
            operands = _operands(sizes, config, compresses)
        held, edges = given.now, _edges(operands) if grad else []
        with made:
            out = _attend(operands, config, sizes.dim**-0.5, BRANCHES, backends)
        del operands
        trace = Trace(made.peak, made.now, held - given.now)
        if not grad:
            return trace
        towards = torch.empty_like(out)
        made.peak = made.now
        with made:
            _, *gradients = torch.autograd.grad(out, edges, towards)
        return replace(trace, backward=made.peak, gradients=sum(x.nbytes for x in gradients))


def _operands(sizes: Sizes, config: NSAConfig, compresses: bool) -> Operands:
    """Operands of the operator alone; or as NativeSparseAttention gives them, values being views of one projection."""
    kv = sizes.batch, sizes.seq_len, sizes.kv_heads, sizes.dim
    anchor = torch.empty((), dtype=sizes.dtype, device="meta", requires_grad=True)

    def tensor(*shape: int) -> Tensor:
        return anchor.expand(shape).clone()  # no leaf: autograd holds leaves, needed or not

    q, gates = (tensor(sizes.batch, sizes.seq_len, sizes.heads, width) for width in (sizes.dim, 3))
    if compresses:
        k, v = tensor(*kv), tensor(*kv)
        return Operands(q, (k, k, k), (v, v, v), gates=gates)
    k_cmp, v_cmp = (tensor(sizes.batch, config.cmp_tokens(sizes.seq_len), *kv[2:]) for _ in range(2))
    _, v_slc, v_win = tensor(*kv[:2], 3, *kv[2:]).unbind(2)
    k_slc, k_win = tensor(*kv), tensor(*kv)
    return Operands(q, (k_slc, k_slc, k_win), (v_slc, v_slc, v_win), k_cmp, v_cmp, gates)


def _edges(operands: Operands) -> list[Any]:
    """Where gradients go: gates, q, and each distinct key and value."""
    compressed = (x for x in (operands.k_cmp, operands.v_cmp) if x is not None)
    tensors = operands.gates, operands.q, *operands.keys, *operands.values, *compressed
    return [get_gradient_edge(x) for x in {id(x): x for x in tensors}.values() if x is not None]


class Allocations(TorchDispatchMode):
    """Bytes of all storages made within the context, each counted until nothing refers to it.

    Tensors saved by autograd count, because they refer to storages. An operation's own temporary memory does not.

    Args:
        granule: multiple, in bytes, that the allocator rounds sizes up to.

    Attributes:
        now: bytes live.
        peak: most bytes live since it was last set.
    """

    def __init__(self, granule: int = 1) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._granule = granule
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {storage._cdata for storage in _storages((args, kwargs))}  # views and results written in place
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._alive:
                size = -(-storage.nbytes() // self._granule) * self._granule
                self._alive[storage._cdata] = weakref.ref(storage, partial(self._release, storage._cdata, size))
                self.now += size
                self.peak = max(self.peak, self.now)
        return result

    def _release(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.now -= size


def _storages(tree: object) -> list[Any]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, Tensor)]
