"""One decoding step: stores a new token in the cache and computes its attention, as the operators define it.

A step reads the compressed tokens, the chosen blocks and the window: O(S/d + n·l' + w) tokens, against S of dense
attention. If the Triton backend chooses the blocks, its kernels compute the whole step; a CUDA graph of it can be
captured if the cache has a capacity and a step ran before, and replayed until the cache is full. Otherwise plain
PyTorch computes it.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ._inputs import without_autocast
from .backends import BACKENDS, Heads, default, resolve, triton
from .cache import DenseCache, NSACache
from .errors import InputError
from .functional import dense_attention
from .rope import angles, frequencies, rotate
from .routes import Branch, note

KERNEL, TRITON = "decode", "decode-triton"

# (keys, values, position of the first) -> compressed keys, rotated, and values. Position: int, or int32 [1].
Compress = Callable[[Tensor, Tensor, Tensor | int], tuple[Tensor, Tensor]]


def nsa_step(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, cache: NSACache, *, theta: float, compress: Compress, backend: str
) -> Tensor:
    """Attention [B,1,Hq,Dv] of one new token, whose keys and values are stored in the cache.

    Args:
        q: its query [B,1,Hq,Dk], unrotated, as the keys.
        k, v: its keys [B,1,3,Hkv,Dk] and values [B,1,3,Hkv,Dv] of the branches cmp, slc, win.
        gates: logits [B,1,Hq,3] in this order.
        cache: holds at least one token.
        theta: RoPE's base.
        compress: used for a learned compression, and by plain PyTorch.
        backend: name of the backend that chooses the blocks; use the prefill's, so that both choose alike.

    Raises:
        InputError: the cache is full, holds other sequences or another dtype, a graph is being captured of a cache
            without a capacity, or gradients are asked for.
        BackendError: the backend is unknown or cannot run.
    """
    select = resolve(backend, ("select",), q.device, q.dtype, Heads.of(q, k, v))["select"]
    refuse_gradients(q, k, v, gates)
    if select is BACKENDS["triton"]:
        triton.refuse_too_large(q, k, v)
        return _kernel_step(q, k, v, gates, cache, theta, compress)
    cache.recount()
    cache.make_room(k)
    position = cache.length
    cos, sin = angles(torch.arange(position, position + 1, device=q.device), q.shape[-1], theta, q.dtype)
    k_cmp, k_slc, k_win = k.unbind(2)
    v_cmp, v_slc, v_win = v.unbind(2)
    cache.take((k_cmp, rotate(k_slc, cos, sin), rotate(k_win, cos, sin)), (v_cmp, v_slc, v_win))
    last = cache.k_open.in_order()
    made = compress(last, cache.v_open.in_order(), cache.length - last.shape[1])
    new = cache.config.cmp_tokens(cache.length) - cache.k_cmp.length
    cache.add_compressed(made[0][:, :new], made[1][:, :new])
    q = rotate(q, cos, sin)
    with torch.no_grad(), without_autocast(q):
        blocks = select.select(q, cache.k_cmp.values(), cache.config, position, q.shape[-1] ** -0.5)[:, 0].long()
    return _attend_all(q, torch.sigmoid(gates).to(q.dtype), cache, blocks)


def dense_step(q: Tensor, k: Tensor, v: Tensor, cache: DenseCache, *, theta: float) -> Tensor:
    """Dense attention of one new token, as `nsa_step`: unrotated q [B,1,Hq,Dk], k [B,1,Hkv,Dk], v [B,1,Hkv,Dv]."""
    refuse_gradients(q, k, v)
    if default(q.device, q.dtype, Heads.of(q, k, v)) == "triton":
        kernels = _prepared(cache, k, theta)
        note("dense", TRITON)
        rotated = kernels.take_dense(q[:, 0].contiguous(), k[:, 0].contiguous(), v[:, 0].contiguous(), cache)
        out = kernels.attend_dense(rotated, cache)
        cache.note_length(cache.length + 1)
        return out.unsqueeze(1)
    cache.recount()
    cache.make_room(k)
    position = torch.arange(cache.length, cache.length + 1, device=q.device)
    cos, sin = angles(position, q.shape[-1], theta, q.dtype)
    cache.take(rotate(k, cos, sin), v)
    return dense_attention(rotate(q, cos, sin), cache.k.values(), cache.v.values())


def refuse_gradients(*tensors: Tensor) -> None:
    """Raise InputError if gradients would flow to tensors behind a cache, which gives none for the tokens it holds."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise InputError("cache", "gradients are enabled", "continue it under torch.no_grad(), or train without one")


def _kernel_step(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, cache: NSACache, theta: float, compress: Compress
) -> Tensor:
    kernels = _prepared(cache, k, theta)
    for branch in ("cmp", "select", "slc", "win"):
        note(branch, TRITON)
    rotated = kernels.take(q[:, 0].contiguous(), k[:, 0].contiguous(), v[:, 0].contiguous(), cache)
    if cache.config.compress == "mlp":
        _store_learned(cache, compress)
    out, _ = kernels.attend(rotated, gates[:, 0].contiguous(), cache)
    cache.note_length(cache.length + 1)
    return out.unsqueeze(1)


def _prepared(cache: NSACache | DenseCache, k: Tensor, theta: float) -> ModuleType:
    """The kernels, after the cache got room for a token with keys k, and RoPE's frequencies."""
    from .kernels.decode import step  # needs Triton

    cache.make_room(k)
    if cache.frequencies is None:
        cache.frequencies = frequencies(k.shape[-1], theta, k.device)
    return step


def _store_learned(cache: NSACache, compress: Compress) -> None:
    """Compress the last cmp_block tokens and store the result if they complete a block, without asking the device.

    The newest token is stored but not counted yet; beyond the capacity it is not stored, and completes nothing.
    """
    assert cache.position is not None
    block, stride = cache.config.cmp_block, cache.config.cmp_stride
    first = cache.position + 1 - block
    slots = (torch.arange(block, device=first.device) + first) % block
    made = compress(cache.k_open.buffer[:, slots], cache.v_open.buffer[:, slots], first)
    complete = (first >= 0) & (first % stride == 0)
    if cache.capacity is not None:
        complete &= cache.position < cache.capacity
    for held, new in zip((cache.k_cmp.buffer, cache.v_cmp.buffer), made, strict=True):
        index = (first // stride).clamp(0, held.shape[1] - 1).long()
        held.index_copy_(1, index, torch.where(complete, new, held[:, index]).to(held.dtype))


def _attend_all(q: Tensor, gates: Tensor, cache: NSACache, blocks: Tensor) -> Tensor:
    """Gated sum [B,1,Hq,Dv] of the branches for the token stored last; q is rotated."""
    scale, config, k_cmp = q.shape[-1] ** -0.5, cache.config, cache.k_cmp.values()
    cmp, slc, win = gates.split(1, -1)
    tokens = blocks.unsqueeze(-1) * config.slc_block + torch.arange(config.slc_block, device=blocks.device)
    visible = ((tokens >= 0) & (tokens < cache.length)).flatten(2)
    b = torch.arange(blocks.shape[0], device=blocks.device)[:, None, None]
    h = torch.arange(blocks.shape[1], device=blocks.device)[None, :, None]
    k_slc, v_slc = (  # [B,Hkv,slc_count·slc_block,D]
        held.buffer.unflatten(1, (-1, config.slc_block))[b, blocks.clamp_min(0), :, h].flatten(2, 3)
        for held in (cache.k_slc, cache.v_slc)
    )
    out = slc * _attend("slc", q, k_slc, v_slc, scale, visible)
    k_win, v_win = cache.k_win.values(), cache.v_win.values()
    out = out + win * _attend("win", q, k_win.transpose(1, 2), v_win.transpose(1, 2), scale)
    if k_cmp.shape[1] > 0:  # before the first compressed token this branch gives zeros
        out = out + cmp * _attend("cmp", q, k_cmp.transpose(1, 2), cache.v_cmp.values().transpose(1, 2), scale)
    return out


def _attend(branch: Branch, q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """softmax(q·k·scale)·v over the visible tokens: q [B,1,Hq,D], k and v [B,Hkv,T,D], visible [B,Hkv,T]."""
    note(branch, KERNEL)
    grouped = q[:, 0].unflatten(1, (k.shape[1], -1))  # [B,Hkv,G,D]
    scores = grouped @ k.transpose(-1, -2) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(2), -torch.inf)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    p = torch.softmax(scores, -1, dtype=wide).to(v.dtype)
    return (p @ v).flatten(1, 2).unsqueeze(1)
