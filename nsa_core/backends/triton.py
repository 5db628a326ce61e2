"""Every branch by the project's Triton kernels, forward and backward.

The kernels are imported when it is first asked whether they can run: without Triton, with a version that they were not
run with, or with one that lacks what they use, this backend reports itself unavailable. The ranges of versions are
stated here alone; pyproject.toml's bounds are checked against them by tests/deploy/test_install.py.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .._decorators import constant
from .._inputs import Operands
from ..config import NSAConfig
from ..errors import BackendError, InputError
from ..packed_sequences import compressed_counts
from ..routes import BRANCHES, Branch, note

_WIDEST = 256  # head dim
_MOST = 65_535  # sequences times kv heads: CUDA's limit of programs along one grid dimension
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A100; H100, H200 and GH200. Every kernel is compiled for these ahead of time (kernels/aot). Others have less shared
# memory or other layouts of matrix products, which some kernels rely on, and nothing was run on them.
CAPABILITIES = ((8, 0), (9, 0))


class Tested:
    """Minor versions of a package, the first and the last, that tests/gpu passed with on a card."""

    def __init__(self, package: str, first: tuple[int, int], last: tuple[int, int]) -> None:
        self._first, self._last = first, last
        # As pip takes it: "triton>=3.6,<3.10".
        self.requirement = f"{package}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"

    def __contains__(self, version: str) -> bool:
        """Whether a version ("3.6.0", "2.11.0+cu130") is in the range; one that cannot be read is not."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self._first <= (int(found[1]), int(found[2])) <= self._last

    def __str__(self) -> str:
        return "{}.{} to {}.{}".format(*self._first, *self._last)


TRITON = Tested("triton", (3, 6), (3, 9))
TORCH = Tested("torch", (2, 11), (2, 13))
_ENTRIES = ("operators", "decode.step", "training.cross_entropy", "training.heads", "training.swiglu")


@constant  # asked once while tracing, which cannot search for modules
def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why this backend cannot run there, or None. On the CPU it needs Triton's interpreter, for tests."""
    if dtype not in _DTYPES:
        return f"it computes bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        return triton_problem() or unsupported(capability_of(device))
    if device.type == "meta" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return triton_problem()
    return f"it needs a GPU, or TRITON_INTERPRET=1 on the cpu, and does not run on {device.type}"


def unsupported(capability: tuple[int, int] | None) -> str | None:
    """Reason why there are no kernels for GPUs of this compute capability; None if there are, or if it is unknown."""
    if capability is None or capability in CAPABILITIES:
        return None
    known, this = " and ".join("{}.{}".format(*each) for each in CAPABILITIES), "{}.{}".format(*capability)
    return f"its kernels are for GPUs of compute capability {known}, this one has {this}"


def untested(version: str) -> str | None:
    """Reason why the kernels do not run with this version of Triton, with the fix; None if they were run with it."""
    if version in TRITON:
        return None
    return f'Triton {version} is untested, the kernels were run with {TRITON}: pip install "nsa-bench[gpu]"'


def triton_version() -> str | None:
    """Version of the installed Triton; None without one."""
    if find_spec("triton") is None:
        return None
    for name in ("triton", "pytorch-triton"):  # the latter is of PyTorch's nightly builds
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


@cache
def triton_problem() -> str | None:
    """Reason why the kernels cannot run with the Triton here, with the fix; None if they can. Found once a process.

    Importing the kernels takes about half a second, and no driver.
    """
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA's GPUs, and this PyTorch is for AMD's"
    version = triton_version()
    if version is None:
        return 'it needs Triton: pip install "nsa-bench[gpu]"'
    if reason := untested(version):
        return reason
    try:
        for entry in _ENTRIES:
            import_module(f"nsa_core.kernels.{entry}")
    except Exception as err:  # whatever the import raises, other backends remain
        problem = f"{type(err).__name__}: {str(err).partition(chr(10))[0]}"
        again = f'pip install --force-reinstall "{TRITON.requirement}"'
        return f"the kernels do not load with the Triton {version} installed here ({problem}): {again}"
    return None


class Heads(NamedTuple):
    """Heads that a kernel's tile has to hold."""

    width: int  # the widest head dim
    group: int  # query heads of one kv head, which are in one tile

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
    operands: Operands, config: NSAConfig, branches: tuple[Branch, ...], scale: float,
    packed: tuple[Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """Gated sum of `branches`: blocks are chosen with the compressed branch's softmax, and one kernel merges.

    Args:
        operands: keys and values are compressed here where k_cmp or v_cmp is None.
        packed: of packed sequences [1,total,..] their int32 bounds, and a length that none exceeds.
    """
    batch, rows = operands.q.shape[:2]
    if packed is None and batch * operands.keys[0].shape[2] > _MOST and operands.offset == 0 and not operands.q.is_meta:
        packed = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=operands.q.device), rows
        operands = operands.each(lambda x: x.flatten(0, 1)[None])
    q, gates, (bounds, longest) = operands.q, operands.gates, packed or (None, 0)
    if gates is not None:
        if len(branches) < len(BRANCHES):
            gates = torch.stack([gates[..., BRANCHES.index(branch)] for branch in branches], -1)
        _refuse_negative(gates)
    for branch in branches:
        note(branch, "triton")
    blocks = operands.blocks
    if "slc" in branches and blocks is None:
        note("select", "triton")
    kernels = _kernels(q, operands.values[0])
    call = kernels.Call(config, branches, operands.offset, scale, longest=longest, cu=bounds)
    pairs = dict(zip(BRANCHES, zip(operands.keys, operands.values, strict=True), strict=True))
    k_cmp, v_cmp = operands.k_cmp, operands.v_cmp
    if bounds is not None:
        k_cmp, v_cmp = _apart((k_cmp, v_cmp), bounds, config, q.shape[1])
    if k_cmp is None and v_cmp is None and kernels.has_one_pair(pairs, call):
        call = replace(call, compresses=True)
        del pairs["cmp"]
    elif branches != ("win",) and blocks is None:
        (k, v), with_values = pairs["cmp"], "cmp" in branches  # the choice of blocks needs the keys alone
        if k_cmp is None or (v_cmp is None and with_values):
            made = kernels.compress(k, v if with_values else k, config, bounds)  # the kernel takes a pair
            k_cmp, v_cmp = (made[0] if k_cmp is None else k_cmp), (made[1] if v_cmp is None else v_cmp)
        pairs["cmp"] = k_cmp, k_cmp if v_cmp is None else v_cmp
        if not with_values:
            with torch.no_grad():
                blocks = kernels.select(q, k_cmp, config, operands.offset, scale, bounds, longest)
    out = kernels.attend(q, gates, blocks, [pairs[branch] for branch in branches if branch in pairs], call)
    return out if len(out) == batch else out.view(batch, rows, *out.shape[2:])


def select_packed(operands: Operands, config: NSAConfig, scale: float, bounds: Tensor, longest: int) -> Tensor:
    """As `select`, of packed sequences [1,total,..]; keys are compressed here if k_cmp is None."""
    note("select", "triton")
    q, k, k_cmp = operands.q, operands.keys[0], operands.k_cmp
    kernels = _kernels(q, k)
    with torch.no_grad():
        if k_cmp is None:
            k_cmp, _ = kernels.compress(k, k, config, bounds)
        else:
            k_cmp, _ = _apart((k_cmp, None), bounds, config, q.shape[1])
        return kernels.select(q, k_cmp, config, 0, scale, bounds, longest)


def _apart(
    compressed: tuple[Tensor | None, Tensor | None], cu_seqlens: Tensor, config: NSAConfig, total: int
) -> tuple[Tensor | None, Tensor | None]:
    """Compressed tokens [1,Σ N,..], those of a sequence that begins at token t from t // cmp_stride on; else zeros."""
    tokens = next((x.shape[1] for x in compressed if x is not None), None)
    if tokens is None:
        return compressed
    bounds, counts = cu_seqlens.long(), compressed_counts(cu_seqlens, config)
    at = torch.arange(total // config.cmp_stride, device=bounds.device)
    sequence = torch.searchsorted(bounds[:-1] // config.cmp_stride, at, right=True) - 1
    place = at - bounds[sequence] // config.cmp_stride
    source = torch.where(place < counts[sequence], (counts.cumsum(0) - counts)[sequence] + place, tokens)
    k_cmp, v_cmp = (
        None if x is None else torch.cat([x, x.new_zeros(1, 1, *x.shape[2:])], 1).index_select(1, source)
        for x in compressed
    )
    return k_cmp, v_cmp


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

    Raises BackendError: tiles of such heads do not fit the device, or there are too many of them.
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
