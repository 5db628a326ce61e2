"""Proof that a forced branch computes itself alone: a trace of what a call reads and launches.

Each branch gets keys and values of its own. PyTorch's dispatcher tells which of them the operations read, forward and
backward, and the kernels' launches tell their stages. A branch whose gate is merely closed would still read its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobs.measure.check import HeadShape, WrongResult
from nsa_core import NSAConfig, nsa_attention
from nsa_core.functional import BRANCHES
from nsa_core.kernels.runtime.launch import observe
from nsa_core.routes import Branch

# Tensors that a branch may read. The selection scores the compressed keys, and no compressed value.
_READS: Mapping[Branch, tuple[str, ...]] = {
    "cmp": ("keys of cmp", "values of cmp"),
    "slc": ("keys of cmp", "keys of slc", "values of slc"),
    "win": ("keys of win", "values of win"),
}
# Words in the names of stages that are another branch's.
_FOREIGN: Mapping[Branch, tuple[str, ...]] = {
    "cmp": ("window", "forced", "selected", "scores", "topk", "inverse"),
    "slc": ("window",),
    "win": ("compress", "forced", "selected", "scores", "topk", "inverse"),
}


def trace_branch(
    branch: Branch,
    implementation: str,
    config: NSAConfig,
    shape: HeadShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    backward: bool,
) -> str:
    """Run one branch on its own on a small case; returns what it ran, an operation or a launch a line.

    Raises:
        WrongResult: it read or launched what belongs to another branch.
    """
    seq_len = (config.slc_count + 1) * config.slc_block
    named = _inputs(shape, seq_len, dtype, device, backward)
    keys = named["keys of cmp"], named["keys of slc"], named["keys of win"]
    values = named["values of cmp"], named["values of slc"], named["values of win"]
    with observe() as launches, torch.set_grad_enabled(backward):
        reads = _Reads(named)
        with reads:
            out = nsa_attention(
                named["q"], keys, values, named["gates"], config, backend=implementation, branches=(branch,)
            )
            got = torch.autograd.grad(out.sum(), list(named.values()), allow_unused=True) if backward else ()
    used = {name for name, gradient in zip(named, got, strict=False) if gradient is not None}
    stages = [launch.stage for launch in launches]
    _refuse_foreign(branch, implementation, reads.names | used, stages)
    return "\n".join([*reads.operations, *(f"launch of stage {stage}" for stage in stages), ""])


def _inputs(
    shape: HeadShape, seq_len: int, dtype: torch.dtype, device: torch.device, backward: bool
) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    sizes = {"q": (shape.query_heads, shape.head_dim), "gates": (shape.query_heads, len(BRANCHES))}
    sizes |= {f"{kind} of {name}": (shape.kv_heads, shape.head_dim) for kind in ("keys", "values") for name in BRANCHES}
    made = {
        name: torch.rand(1, seq_len, *size, generator=generator, dtype=dtype, device=device)
        for name, size in sizes.items()
    }
    return {name: x.requires_grad_(backward) for name, x in made.items()}


def _refuse_foreign(branch: Branch, implementation: str, read: set[str], stages: Sequence[str]) -> None:
    foreign = sorted(name for name in read if name not in ("q", "gates", *_READS[branch]))
    foreign += sorted({stage for stage in stages if any(word in stage for word in _FOREIGN[branch])})
    if foreign:
        raise WrongResult(
            f"{implementation}: branch {branch} alone also ran for other branches: {', '.join(foreign)}; a forced "
            "branch computes nothing else"
        )


class _Reads(TorchDispatchMode):
    """Notes which of the named tensors an operation takes, by their storage, and the operations in order.

    A view, a detach or an unbind of a tensor reads nothing of it.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._named = {x.untyped_storage().data_ptr(): name for name, x in named.items()}
        self.names: set[str] = set()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            read = {self._named[at] for x in tensors if (at := x.untyped_storage().data_ptr()) in self._named}
            self.names |= read
            self.operations.append(f"{func} {', '.join(sorted(read))}".rstrip())
        return func(*args, **(kwargs or {}))
