"""A layout's kernels, compiled in parallel before its first call: one after the other they take half a minute or more.

Called by operators.py, with a call's settings and tensors' kinds; a layout is heads, head dims, dtype and settings.
Lengths are no part of it, so that all later calls find their kernels compiled.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from . import attention
from .call import Call
from .runtime.launch import Launch, compile_only, is_watched, record
from .runtime.tiles import assume, capability

# All blocks selected; blocks to choose; tiles of long sequences; the choice among many blocks.
_LENGTHS = 512, 2048, 65_536, 131_072


def compile_layout(call: Call, q: Tensor, gates: Tensor, flat: tuple[Tensor, ...]) -> None:
    """Compile what forward and backward of `call` launch, for tensors like these of any length, if not done before."""
    if q.is_cuda and not is_watched():
        kind = replace(call, offset=0, scale=1.0, longest=0, cu=None)
        widths = tuple(x.shape[2:] for x in (q, gates, *flat))
        _compile_layout(kind, call.packed, widths, q.dtype, gates.dtype, q.device)


@cache
def _compile_layout(
    call: Call, packed: bool, widths: tuple[torch.Size, ...], dtype: torch.dtype, gate_dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Make the launches for each of the lengths on tensors without memory, and compile them."""
    with assume(capability(device)), record() as seen, torch.no_grad(), torch.device("meta"):
        for tokens in _LENGTHS:
            if packed:
                call = replace(call, longest=tokens, cu=torch.empty(17, dtype=torch.int32))
            compressed = tokens // call.config.cmp_stride if packed else call.config.cmp_tokens(tokens)
            q = torch.empty(1, tokens, *widths[0], dtype=dtype)
            gates = torch.empty(1, tokens, *widths[1], dtype=gate_dtype)
            given_compressed = 2 * (call.branches[0] == "cmp" and not call.compresses)  # keys and values of cmp
            flat = [
                torch.empty(1, compressed if i < given_compressed else tokens, *width, dtype=dtype)
                for i, width in enumerate(widths[2:])
            ]
            blocks = None
            if "slc" in call.branches and "cmp" not in call.branches:
                blocks = torch.empty(1, tokens, flat[0].shape[2], call.config.slc_count, dtype=torch.int32)
            out, saved = attention.forward(call, blocks, q, gates, flat)
            if call.keeps:
                attention.backward(call, q, gates, flat, saved, torch.empty_like(out))
    distinct: dict[str, Launch] = {}
    for one in seen:
        types = [x.dtype if isinstance(x, Tensor) else type(x) for x in one.arguments.values()]
        distinct[str((one.kernel.__name__, one.constants, one.tile, types))] = one
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(compile_only, device=device), distinct.values()))
