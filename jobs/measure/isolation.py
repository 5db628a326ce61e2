"""Proof that a forced branch computes itself alone: a trace of what a call reads and launches.

Each branch gets keys and values of its own. PyTorch's dispatcher tells which of them the operations read, forward and
backward, and the kernels' launches tell their stages. A branch whose gate is merely closed would still read its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jobs.measure.call import ModelCase
from jobs.measure.check import WrongResult
from nsa_core import nsa_attention
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


def trace_branch(case: ModelCase, branch: Branch) -> str:
    """Run one branch of a case on its own on a short sequence; returns what it ran, an operation or a launch a line.

    Raises WrongResult: it read or launched what belongs to another branch.
    """
    config, shape = replace(case.model.nsa, compress="mean"), case.shape
    seq_len, kv = (config.slc_count + 1) * config.slc_block, (shape.kv_heads, shape.head_dim)
    sizes = {"q": (shape.query_heads, shape.head_dim), "gates": (shape.query_heads, len(BRANCHES))}
    sizes |= {f"{kind} of {name}": kv for kind in ("keys", "values") for name in BRANCHES}
    options: dict[str, Any] = {"dtype": case.torch_dtype, "device": case.torch_device}
    options["generator"] = torch.Generator(case.torch_device).manual_seed(0)
    named = {name: torch.rand(1, seq_len, *size, **options) for name, size in sizes.items()}
    for x in named.values():
        x.requires_grad_(case.backward)
    q, gates, k_cmp, k_slc, k_win, v_cmp, v_slc, v_win = named.values()
    with observe() as launches, torch.set_grad_enabled(case.backward), _Reads(named) as reads:
        how: dict[str, Any] = {"backend": case.implementation, "branches": (branch,)}
        out = nsa_attention(q, (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win), gates, config, **how)
        got = torch.autograd.grad(out.sum(), list(named.values()), allow_unused=True) if case.backward else ()
    read = reads.names | {name for name, gradient in zip(named, got, strict=False) if gradient is not None}
    stages = [launch.stage for launch in launches]
    refuse_foreign(branch, case.implementation, read, stages)
    return "\n".join([*reads.operations, *(f"launch of stage {stage}" for stage in stages), ""])


def refuse_foreign(branch: Branch, implementation: str, read: set[str], stages: Sequence[str]) -> None:
    """Raise WrongResult for tensors that were read, or stages that were launched, for other branches."""
    foreign = sorted(name for name in read if name not in ("q", "gates", *_READS[branch]))
    foreign += sorted({stage for stage in stages if any(word in stage for word in _FOREIGN[branch])})
    if foreign:
        raise WrongResult(
            f"{implementation}: branch {branch} alone also ran for other branches: {', '.join(foreign)}; a forced "
            "branch computes nothing else"
        )


class _Reads(TorchDispatchMode):
    """Notes the operations in order, and which of the named tensors they read by their storage, as a view does not."""

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
