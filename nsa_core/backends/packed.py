"""Queries grouped by the number of keys that they see, each group attended at once: no key is padded or masked.

The visible keys of all queries lie end to end in one tensor, so that a group is a view of it. Queries of the compressed
branch that see equally many tokens see the same ones, and need no copies. Each group is a call of
scaled_dot_product_attention, a window has as many groups as tokens, and the group sizes are read on the host, so that
the call waits for the device. cuDNN has no part in them: where PyTorch chose it, a branch's first passes took up to two
minutes on an H200, without it seconds; presumably it makes a plan for every number of keys. Gradients on CUDA are
bit-reproducible only under torch.use_deterministic_algorithms(True); "auto" does not take this backend.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..config import NSAConfig
from ..reference import positions, wide
from ..routes import note
from . import _common
from ._common import copies, gated

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_MOST_QUERIES = 65_535  # of a call: CUDA's limit for the second axis of a grid


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type in ("cpu", "cuda") else f"it runs on cpu and cuda, not on {device.type}"


@sdpa_kernel(_KERNELS)
def compressed(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, gate: Tensor | None, config: NSAConfig, offset: int, scale: float
) -> Tensor:
    """Compressed branch; cmp_stride queries in a row see the same tokens and are attended at once."""
    note("cmp", "packed")
    keys, values = (wide(x).transpose(1, 2) for x in (k_cmp, v_cmp))  # sums of gradients over groups are wide, too
    parts = []
    for start, stop, tokens in _runs(q.shape[1], config, offset):
        if tokens == 0:
            parts.append(q.new_zeros(q.shape[0], stop - start, q.shape[2], v_cmp.shape[-1]))
            continue
        rows = q[:, start:stop].unflatten(2, (k_cmp.shape[2], -1)).transpose(1, 2)  # [B,Hkv,C,G,D]
        k, v = (x[:, :, :tokens].to(q.dtype) for x in (keys, values))
        out = scaled_dot_product_attention(rows.flatten(2, 3), k, v, scale=scale)
        parts.append(out.unflatten(2, rows.shape[2:4]).transpose(1, 2).flatten(2, 3))
    return gated(torch.cat(parts, 1), gate)


def select(q: Tensor, k_cmp: Tensor, config: NSAConfig, offset: int, scale: float) -> Tensor:
    """Selected blocks, from scores in float32 (float64 for float64), of queries that see the same tokens at once."""
    note("select", "packed")
    with torch.no_grad():
        keys, parts = wide(k_cmp).permute(0, 2, 3, 1), []
        for start, stop, tokens in _runs(q.shape[1], config, offset):
            rows = wide(q[:, start:stop]).unflatten(2, (k_cmp.shape[2], -1)).transpose(1, 2)  # [B,Hkv,C,G,D]
            p = torch.softmax(rows.flatten(2, 3) @ keys[..., :tokens] * scale, -1)
            per_query = p.unflatten(2, rows.shape[2:4]).flatten(0, 1)
            scores = _common.importance(per_query, config.slc_blocks(offset + stop), config)
            parts.append(_common.choose(scores, positions(q[:, start:stop], offset + start), config))
        return torch.cat(parts, 1).unflatten(0, (q.shape[0], -1)).transpose(1, 2).contiguous()


def selected(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, blocks: Tensor, config: NSAConfig, scale: float
) -> Tensor:
    """Selected branch; a group has the queries that see equally many tokens of their blocks."""
    note("slc", "packed")
    tokens = blocks.long().unsqueeze(-1) * config.slc_block + torch.arange(config.slc_block, device=q.device)
    visible = (tokens >= 0) & (tokens <= positions(q, k.shape[1] - q.shape[1])[..., None, None, None])
    return _attend(q, k, v, gate, tokens.flatten(3), visible.flatten(3), scale)


def window(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, window: int, scale: float) -> Tensor:
    """Window branch; the queries with a full window are one group, each earlier position is one of its own."""
    note("win", "packed")
    before = torch.arange(min(window, k.shape[1]) - 1, -1, -1, device=q.device)
    tokens = (positions(q, k.shape[1] - q.shape[1])[:, None] - before)[:, None].expand(q.shape[0], -1, k.shape[2], -1)
    return _attend(q, k, v, gate, tokens, tokens >= 0, scale)


def _runs(rows: int, config: NSAConfig, offset: int) -> Iterator[tuple[int, int, int]]:
    """Runs start:stop of queries that see the same compressed tokens, and the number of these."""
    start = 0
    while start < rows:
        tokens = config.cmp_tokens(offset + start + 1)
        stop = min(rows, tokens * config.cmp_stride + config.cmp_block - 1 - offset)
        yield start, stop, tokens
        start = stop


def _attend(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, tokens: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Attention of every query of a kv head to its visible tokens, [B,S,Hkv,L] both."""
    (batch, length, kv_heads), group = k.shape[:3], q.shape[2] // k.shape[2]
    first = torch.arange(batch, device=q.device)[:, None, None, None] * length
    heads = torch.arange(kv_heads, device=q.device)[:, None]
    places, visible = ((first + tokens) * kv_heads + heads).flatten(0, 2), visible.flatten(0, 2)
    counts = visible.sum(-1)
    order = counts.argsort(stable=True)
    places = places[order][visible[order]]  # keys of the first query, then of the second, ...
    keys, values = (copies(x.flatten(0, 2), places) for x in (k, v))
    rows = copies(q.reshape(-1, group, q.shape[-1]).flatten(1), order).unflatten(1, (group, -1))
    back = copies(torch.cat(_attended(rows, keys, values, counts, scale)).flatten(1), order.argsort())
    return gated(back.view(*q.shape[:-1], v.shape[-1]), gate)


@sdpa_kernel(_KERNELS)
def _attended(rows: Tensor, keys: Tensor, values: Tensor, counts: Tensor, scale: float) -> list[Tensor]:
    """Outputs [N,G,Dv] of groups of `rows` [R,G,D], which are ordered by their `counts` of keys."""
    sizes: list[int] = []
    spans: list[int] = []  # keys of each group
    for count, queries in zip(*(x.tolist() for x in torch.unique(counts, return_counts=True)), strict=True):
        for start in range(0, queries, _MOST_QUERIES):
            sizes.append(min(_MOST_QUERIES, queries - start))
            spans.append(sizes[-1] * count)
    parts = []
    for q, *pair in zip(rows.split(sizes), keys.split(spans), values.split(spans), strict=True):
        k, v = (x.unflatten(0, (len(q), -1)).unsqueeze(1) for x in pair)
        parts.append(scaled_dot_product_attention(q.unsqueeze(1), k, v, scale=scale).squeeze(1))
    return parts
