"""Devices, heads, head dims and dtypes for which the kernels are compiled, and the launches of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ...backends.triton import Heads, too_large
from ...config import NSAConfig
from .. import operators
from ..decode import step
from ..runtime.launch import Launch, record
from ..runtime.tiles import assume
from ..training import cross_entropy, heads, swiglu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class CompileCase:
    """Compute capability (80, 90), heads, head dims and dtype (one of DTYPES) of an operator to compile."""

    arch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: str


# The largest groups that an A100 takes. At head dim 64 128 heads fit, too, but the selected backward spills 840 bytes.
_ON_A100 = (256, 2, 128, 128, "bf16"), (128, 2, 256, 256, "bf16")
_ON_ALL = (
    (32, 8, 128, 128, "bf16"),
    *((group * 2, 2, dim, dim, "bf16") for dim in (32, 64, 128, 256) for group in (1, 2, 3, 4, 6, 8, 16)),
    *((8, 2, *dims, "bf16") for dims in ((96, 96), (192, 192), (192, 128), (128, 64))),
    *((8, 2, dim, dim, dtype) for dim in (64, 128, 256) for dtype in ("fp16", "fp32")),
)
CASES = [CompileCase(80, *sizes) for sizes in _ON_A100]
CASES += [CompileCase(arch, *sizes) for arch in (80, 90) for sizes in _ON_ALL]
# Kernels for packed sequences differ in how they look a sequence up: some heads, in bf16, stand for all.
_PACKED = {(32, 8, 128), (12, 2, 64), (32, 2, 128)}


def launches(case: CompileCase) -> list[Launch]:
    """Launches of forward, backward, a decoding step and training of `case`, one for each kernel, constants and tile.

    Sequences are of three lengths, whose pinned constants differ, and packed; keys are separate and shared. None of
    heads that the backend refuses, and none of decoding for groups beyond 16: the window's kernel repeats its code for
    each head, which takes minutes to compile.
    """
    group, dtype = case.heads // case.kv_heads, DTYPES[case.dtype]
    if too_large(divmod(case.arch, 10), dtype, Heads(max(case.dim, case.value_dim), group)):
        return []
    with assume(case.arch), record() as seen:
        for tokens in (2048, 65_536, 131_072):
            _run_once(case, tokens, shared=True)
            _run_once(case, tokens, shared=False)
        if (case.heads, case.kv_heads, case.dim) in _PACKED and case.dim == case.value_dim:
            _run_once(case, 65_536, shared=True, packed=True)
            _run_once(case, 65_536, shared=False, packed=True)
        if group <= 16:
            step.trace(case.heads, case.kv_heads, case.dim, case.value_dim, dtype)
        _train_once(case)
    distinct = {(one.kernel.__module__, one.kernel.__name__, str((one.constants, one.tile))): one for one in seen}
    return list(distinct.values())


def _run_once(case: CompileCase, tokens: int, shared: bool, packed: bool = False) -> None:
    """Run a forward without gradients, then forward and backward, on meta tensors; `packed`: of many sequences."""
    made = partial(torch.empty, 1, tokens, dtype=DTYPES[case.dtype], device="meta", requires_grad=True)
    cu = torch.empty(101, dtype=torch.int32, device="meta") if packed else None
    call = operators.Call(NSAConfig(), ("cmp", "slc", "win"), 0, 0.125, compresses=shared, longest=tokens, cu=cu)
    q, gates = made(case.heads, case.dim), made(case.heads, 3)
    given = [(made(case.kv_heads, case.dim), made(case.kv_heads, case.value_dim)) for _ in range(1 if shared else 3)]
    pairs = given * 2 if shared else [operators.compress(*given[0], call.config, cu), *given[1:]]
    with torch.no_grad():
        operators.attend(q, gates, None, pairs, call)
    out = operators.attend(q, gates, None, pairs, call)
    torch.autograd.grad(out, [q, gates, *(x for pair in given for x in pair)], torch.empty_like(out))


def _train_once(case: CompileCase) -> None:
    """Run the non-attention kernels of compiled training."""
    made = partial(torch.empty, dtype=DTYPES[case.dtype], device="meta")
    width = (case.heads + 6 * case.kv_heads) * case.dim + 3 * case.heads
    y, bias, angles = (
        made(1, 8, width + -width % 8),
        made(3 * case.heads),
        made(8, 1, case.dim // 2, dtype=torch.float32),
    )
    apart = heads.forward(y, bias, angles, angles, case.heads, case.kv_heads)
    heads.backward(apart, apart[-1], angles, angles, y.shape[-1])
    halves, logits = made(8, 4608), made(8, 50_304)
    swiglu.backward(halves, swiglu.forward(halves))
    cross_entropy.forward(logits, made(8, dtype=torch.int64))
