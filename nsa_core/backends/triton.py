"""Every branch by the project's Triton kernels, forward and backward.

The kernels are imported when it is first asked whether they can run: without Triton, with a version that they were not
run with, or with one that lacks what they use, this backend reports itself unavailable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .._inputs import each_once, triple
from .._tracing import constant
from ..config import NSAConfig
from ..errors import BackendError, InputError
from ..routes import Branch, note
from ._toolchain import triton_problem

_WIDEST = 256  # head dim
_MOST = 65_535  # sequences times kv heads: CUDA's limit of programs along one grid dimension
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A100; H100, H200 and GH200. Every kernel is compiled for these ahead of time (kernels/aot). Others have less shared
# memory or other layouts of matrix products, which some kernels rely on, and nothing was run on them.
CAPABILITIES = ((8, 0), (9, 0))


@constant  # asked once while tracing, which cannot search for modules
def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why this backend cannot run there, or None. On the CPU it needs Triton's interpreter, for tests."""
    if dtype not in _DTYPES:
        return f"it computes bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        return triton_problem() or unsupported(capability_of(device))
    if device.type == "meta" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return triton_problem()
    return f"it runs on cuda, and on the cpu only in Triton's interpreter (TRITON_INTERPRET=1), not on {device.type}"


def unsupported(capability: tuple[int, int] | None) -> str | None:
    """Reason why there are no kernels for GPUs of this compute capability; None if there are, or if it is unknown."""
    if capability is None or capability in CAPABILITIES:
        return None
    known, this = " and ".join("{}.{}".format(*each) for each in CAPABILITIES), "{}.{}".format(*capability)
    return f"its kernels are for GPUs of compute capability {known}, this one has {this}"


class Heads(NamedTuple):
    """Heads that a kernel's tile has to hold.

    Attributes:
        width: the widest head dim.
        group: query heads of one kv head, which are in one tile.
    """

    width: int
    group: int

    @classmethod
    def of(cls, q: Tensor, *others: Tensor) -> Heads:
        """Heads of q [..,Hq,Dk] and of keys or values [..,Hkv,D]."""
        return cls(max(x.shape[-1] for x in (q, *others)), q.shape[-2] // others[0].shape[-2])


def too_large(capability: tuple[int, int] | None, dtype: torch.dtype, heads: Heads) -> str | None:
    """Reason why no tile holds these heads on a GPU of this compute capability; None if one does, or if it is unknown.

    The shared memory that tiles take is compiled ahead of time up to these limits (kernels/aot).
    """
    old = capability is not None and capability < (9, 0)
    widest = 128 if old and dtype == torch.float32 else _WIDEST
    if heads.width > widest:
        return f"its tiles hold head dims up to {widest} there, not {heads.width}"
    if dtype != torch.float32:  # with more heads, a row for each takes too much of the shared memory
        most = 64 if old and heads.width > 128 else 128
    else:
        most = 128 if heads.width <= 64 else 64 if heads.width <= 128 else 32
    if heads.group > most:
        return f"its tiles hold up to {most} query heads of a kv head there, not {heads.group}"
    return None


def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    return _one("cmp", q, k_cmp, v_cmp, gate, None, config, offset, scale)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks by exact top-k, a chunk of queries at a time."""
    note("select", "triton")
    with torch.no_grad():
        return _kernels(q, k_cmp).select(q, k_cmp, config, offset, scale)


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch; each block is loaded once for all queries that chose it."""
    return _one("slc", q, k, v, gate, blocks, config, k.shape[1] - q.shape[1], scale)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    return _one("win", q, k, v, gate, None, NSAConfig(window=window), k.shape[1] - q.shape[1], scale)


def attend(
    q: Tensor, pairs: Mapping[Branch, tuple[Tensor, Tensor]], compressed: tuple[Tensor | None, Tensor | None],
    gates: Tensor, config: NSAConfig, branches: tuple[Branch, ...], offset: int, scale: float,
) -> Tensor:  # fmt: skip
    """Gated sum of all branches: blocks are chosen with the compressed branch's softmax, and one kernel merges."""
    batch, rows = q.shape[:2]
    if batch * pairs["cmp"][1].shape[2] <= _MOST or offset > 0 or q.is_meta:
        return _attend(q, pairs, compressed, gates, _kernels(q, pairs["cmp"][1]).Call(config, branches, offset, scale))

    def joined(x: Tensor) -> Tensor:
        """A batch [B,S,..] as packed sequences [1,B·S,..]."""
        return x.flatten(0, 1)[None]

    bounds = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=q.device)
    keys, values = (each_once(joined, triple(pair[i] for pair in pairs.values())) for i in range(2))
    k_cmp, v_cmp = (None if x is None else joined(x) for x in compressed)
    pairs = dict(zip(pairs, zip(keys, values, strict=True), strict=True))
    out = attend_packed(joined(q), pairs, (k_cmp, v_cmp), joined(gates), config, branches, scale, bounds, rows)
    return out.view(batch, rows, *out.shape[2:])


def attend_packed(
    q: Tensor, pairs: Mapping[Branch, tuple[Tensor, Tensor]], compressed: tuple[Tensor | None, Tensor | None],
    gates: Tensor, config: NSAConfig, branches: tuple[Branch, ...], scale: float, cu_seqlens: Tensor, longest: int,
) -> Tensor:  # fmt: skip
    """As `attend`, of packed sequences [1,total,..] with int32 bounds, of which none is longer than `longest`."""
    kernels = _kernels(q, pairs["cmp"][1])
    apart = tuple(None if x is None else _apart(x, cu_seqlens, config, q.shape[1]) for x in compressed)
    call = kernels.Call(config, branches, 0, scale, longest=longest, cu=cu_seqlens)
    return _attend(q, pairs, (apart[0], apart[1]), gates, call)


def select_packed(
    q: Tensor, k: Tensor, k_cmp: Tensor | None, config: NSAConfig, scale: float, cu_seqlens: Tensor, longest: int
) -> Tensor:
    """As `select`, of packed sequences [1,total,..]; keys are compressed here if k_cmp is None."""
    note("select", "triton")
    kernels = _kernels(q, k)
    with torch.no_grad():
        if k_cmp is None:
            k_cmp, _ = kernels.compress(k, k, config, cu_seqlens)
        else:
            k_cmp = _apart(k_cmp, cu_seqlens, config, q.shape[1])
        return kernels.select(q, k_cmp, config, 0, scale, cu_seqlens, longest)


def _apart(x: Tensor, cu_seqlens: Tensor, config: NSAConfig, total: int) -> Tensor:
    """Compressed tokens [1,Σ N,..], those of a sequence that begins at token t from t // cmp_stride on; else zeros."""
    bounds = cu_seqlens.long()
    counts = (bounds.diff() - config.cmp_block + config.cmp_stride).clamp_min(0) // config.cmp_stride
    at = torch.arange(total // config.cmp_stride, device=x.device)
    sequence = torch.searchsorted(bounds[:-1] // config.cmp_stride, at, right=True) - 1
    place = at - bounds[sequence] // config.cmp_stride
    source = torch.where(place < counts[sequence], (counts.cumsum(0) - counts)[sequence] + place, x.shape[1])
    return torch.cat([x, x.new_zeros(1, 1, *x.shape[2:])], 1).index_select(1, source)


def _attend(
    q: Tensor, pairs: Mapping[Branch, tuple[Tensor, Tensor]], compressed: tuple[Tensor | None, Tensor | None],
    gates: Tensor, plan: Any,
) -> Tensor:  # fmt: skip
    _refuse_negative(gates)
    kernels, blocks, computed = _kernels(q, pairs["cmp"][1]), None, dict(pairs)
    config, branches = plan.config, plan.branches
    for branch in branches:
        note(branch, "triton")
    if "cmp" in branches and "slc" in branches:
        note("select", "triton")
    if compressed[0] is None and compressed[1] is None and kernels.has_one_pair(pairs, plan):
        return kernels.attend(q, gates, None, [pairs["slc"], pairs["win"]], replace(plan, compresses=True))
    if branches != ("win",):
        (k, v), (k_cmp, v_cmp) = pairs["cmp"], compressed
        if k_cmp is None or (v_cmp is None and "cmp" in branches):
            # The choice of blocks needs the keys alone, and the kernel takes a pair.
            made = kernels.compress(k, v if "cmp" in branches else k, config, plan.cu)
            k_cmp, v_cmp = (made[0] if k_cmp is None else k_cmp), (made[1] if v_cmp is None else v_cmp)
        computed["cmp"] = k_cmp, k_cmp if v_cmp is None else v_cmp
    if "slc" in branches and "cmp" not in branches:
        note("select", "triton")
        with torch.no_grad():
            blocks = kernels.select(q, computed["cmp"][0], config, plan.offset, plan.scale, plan.cu, plan.longest)
    return kernels.attend(q, gates, blocks, [computed[branch] for branch in branches], plan)


def _one(
    branch: Branch, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor | None, config: NSAConfig,
    offset: int, scale: float,
) -> Tensor:  # fmt: skip
    note(branch, "triton")
    if gate is not None:
        _refuse_negative(gate)
    kernels = _kernels(q, v)
    plan = kernels.Call(config, (branch,), offset, scale)
    return kernels.attend(q, None if gate is None else gate.unsqueeze(-1), blocks, [(k, v)], plan)


def _refuse_negative(gates: Tensor) -> None:
    """Raise InputError for gates below 0: the backward takes their logarithm, and gradients would be NaN.

    On a GPU only under autograd's anomaly detection, because a look at them waits for the device.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or gates.is_meta or isinstance(gates, FakeTensor):
        return
    if (torch.is_anomaly_enabled() or not gates.is_cuda) and (gates < 0).any():
        fix = 'give gates of 0 or more, as a sigmoid does, or use backend="chunked"'
        raise InputError("gates", f"{gates.min().item():.3g}", fix)


def _kernels(q: Tensor, other: Tensor) -> ModuleType:
    """Kernels' module, after a check of q [B,S,Hq,Dk] and `other`, keys or values [B,T,Hkv,D].

    Raises:
        BackendError: tiles of such heads do not fit the device, or there are too many of them.
    """
    from ..kernels import operators

    programs = q.shape[0] * other.shape[2]
    if programs > _MOST and not q.is_meta:  # meta tensors: memory can still be predicted
        fix = f"{q.shape[0]} sequences of {other.shape[2]} kv heads are {programs}; it takes {_MOST} at once, use fewer"
        raise BackendError("backend", "'triton'", fix)
    refuse_too_large(q, other)
    return operators


def refuse_too_large(q: Tensor, *others: Tensor) -> None:
    """Raise BackendError if no tile holds the heads of q [..,Hq,Dk] and of keys or values [..,Hkv,D]."""
    capability, heads = capability_of(q.device), Heads.of(q, *others)
    if reason := too_large(capability, q.dtype, heads):
        helps = q.itemsize > 2 and too_large(capability, torch.bfloat16, heads) is None
        fix = 'use backend="chunked"' + (", or half precision" if helps else "")
        raise BackendError("backend", "'triton'", f"{reason}; {fix}")


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None without one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None
