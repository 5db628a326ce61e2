"""The public operators of Native Sparse Attention (arXiv 2502.11089): the door for users, layers and jobs.

Takes plain tensors and an NSAConfig, checks them, resolves backends and unpacks sequences; gives outputs in q's dtype.
Computes no branch itself (backends/ does), and neither projects, rotates (layer.py) nor keeps a cache (decode.py).

Layouts: q [B,S,Hq,Dk], k [B,T,Hkv,Dk], v [B,T,Hkv,Dv], where the S rows of q are the last S of the T positions (T = S
in training and prefill, S = 1 in decoding). With `cu_seqlens` [sequences + 1], sequences of different lengths are
concatenated without a batch axis: q [total,Hq,Dk] and so on, and T = S. Tensors of a wrong shape, dtype or device, and
wrong values, raise InputError, a ValueError that names the argument, its value and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _inputs, context_parallel
from ._inputs import Operands
from .backends import Backend, Heads, dense, resolve, triton
from .config import NSAConfig
from .errors import InputError
from .packed_sequences import check_blocks, checked_bounds, checked_packing, compute_packed, sequence_spans
from .routes import BRANCHES, Branch, profiled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PerBranch = Tensor | tuple[Tensor, Tensor, Tensor]


def nsa_attention(
    q: Tensor,
    k: PerBranch,
    v: PerBranch,
    gates: Tensor,
    config: NSAConfig,
    *,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scale: float | None = None,
    backend: str | Mapping[str, str] = "auto",
    branches: Sequence[str] = BRANCHES,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Gated sum of the compressed, selected and window branches (Eq. 5), differentiable in all tensors.

    Args:
        q: queries [B,S,Hq,Dk].
        k: keys [B,T,Hkv,Dk], or a tuple (cmp, slc, win) of one for each branch.
        v: values [B,T,Hkv,Dv], or a tuple likewise.
        gates: [B,S,Hq,3] in the order cmp, slc, win, already in (0,1). Any factor will do, but gradients by the Triton
            kernels need 0 or more: below, they are NaN, which PyTorch's anomaly detection tells by an InputError.
        config: block sizes, counts and the window.
        k_cmp: compressed keys [B,Nc,Hkv,Dk] in place of compress(k); packed ones are concatenated.
        v_cmp: compressed values [B,Nc,Hkv,Dv] in place of compress(v).
        cu_seqlens: bounds of packed sequences, of which any may be empty.
        max_seqlen: a length that no packed sequence exceeds. The Triton kernels take all sequences at once, without
            waiting for the device, and use it only to do less in the choice of blocks. Other backends compute one after
            the other, and read cu_seqlens on the host, which torch.compile(fullgraph=True) refuses.
        scale: of q·k, above 0; 1/sqrt(Dk) unless given.
        backend: one name, or a name per branch ("cmp", "slc", "win", and "select" for the choice of blocks).
        branches: the branches to compute; the others are neither computed nor part of the sum.
        group: ranks that have a sequence together (`context_parallel`): q, k, v and gates are this rank's shares of it,
            as is the result; k_cmp and v_cmp are of all of it.

    Returns:
        [B,S,Hq,Dv] (packed: [total,Hq,Dv]) in q's dtype. Under autocast the tensors are cast to its dtype first.

    Raises:
        InputError: shapes, dtypes, devices, branches or cu_seqlens that do not fit.
        BackendError: a backend that is unknown or cannot run.
    """
    if gates is None:  # the doors below have none
        raise InputError("gates", None, "give a tensor [B,S,Hq,3]; torch.ones(...) for an ungated sum")
    computed = ordered_branches(branches)
    keys, values = _inputs.per_branch("k", k), _inputs.per_branch("v", v)
    operands = Operands(q, keys, values, k_cmp, v_cmp, gates)
    _check_compression(config, (k_cmp, v_cmp)[: 2 if "cmp" in computed else int("slc" in computed)])
    return _attention(operands, config, computed, cu_seqlens, max_seqlen, scale, backend, group)


def select_blocks(
    q: Tensor, k: Tensor, config: NSAConfig, *, k_cmp: Tensor | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, scale: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Blocks that every query selects (Eq. 8 to 12). No gradient flows through the selection.

    Args:
        q, config, k_cmp, cu_seqlens, max_seqlen, scale: as in nsa_attention.
        k: keys [B,T,Hkv,Dk] of the compressed branch.
        backend: name of the backend that computes it.

    Returns:
        int32 [B,S,Hkv,slc_count], ascending, padded with -1; packed [total,Hkv,slc_count], where block 0 is each
        sequence's first.

    Raises:
        InputError, BackendError: as nsa_attention.
    """
    operands = Operands(q, (k, k, k), (k, k, k), k_cmp).under_autocast()
    operands.check(config, cu_seqlens is not None)
    chosen = resolve(backend, ("select",), q.device, operands.q.dtype, Heads.of(q, k))["select"]
    select = partial(_select, config=config, scale=_scale(scale, q), backend=chosen)
    _check_compression(config, (k_cmp,))
    if _is_empty(q, cu_seqlens):
        return q.new_empty(*q.shape[:-2], k.shape[-2], config.slc_count, dtype=torch.int32)
    with torch.no_grad():
        return _through(select, operands, config, cu_seqlens, max_seqlen, chosen is triton)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, block_size: int = 64, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, scale: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Causal attention to blocks of keys that the caller chose, differentiable in q, k and v.

    Args:
        q, k, v, cu_seqlens, max_seqlen, scale, backend: as in nsa_attention.
        blocks: int32 [B,S,Hkv,n], packed [total,Hkv,n]: the n blocks of each query and kv head, ascending, numbered
            from each sequence's first; none begins after its query. A query with fewer than n such blocks has them all,
            padded with -1 at the end, as any choice of the n best has it; `select_blocks` gives such.
        block_size: tokens of a block.

    Returns:
        [B,S,Hq,Dv] (packed: [total,Hq,Dv]) in q's dtype. A query sees its blocks' tokens up to its own.

    Raises:
        InputError: as nsa_attention, or blocks that are not as above. Those on a GPU are checked there, by a
            device-side assertion.
        BackendError: as nsa_attention.
    """
    if blocks.dim() != q.dim() or blocks.shape[-1] < 1:
        raise InputError("blocks", list(blocks.shape), "give int32 [batch, tokens, kv heads, blocks of each query]")
    config = NSAConfig(*(block_size,) * 3, slc_count=blocks.shape[-1], init_blocks=0, local_blocks=0)
    operands = Operands(q, (k, k, k), (v, v, v), blocks=blocks)
    return _attention(operands, config, ("slc",), cu_seqlens, max_seqlen, scale, backend)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
    scale: float | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Causal attention over the last `window` positions, the query's own included, by a backend's window branch.

    Arguments, result and errors are those of nsa_attention; differentiable in q, k and v. `dense_attention` takes a
    window, too, and computes it by a kernel of PyTorch or of another package.
    """
    operands, config = Operands(q, (k, k, k), (v, v, v)), NSAConfig(window=window)
    return _attention(operands, config, ("win",), cu_seqlens, max_seqlen, scale, backend)


def nsa_attn_varlen_func(
    q: Tensor, k: PerBranch, v: PerBranch, gates: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None,
    causal: bool = True, *, config: NSAConfig | None = None, backend: str | Mapping[str, str] = "auto",
) -> Tensor:  # fmt: skip
    """`nsa_attention` of packed sequences by the names and order of flash-attn's varlen functions.

    Args:
        q, k, v, gates: [total,H,D] and [total,Hq,3], as in nsa_attention.
        cu_seqlens_q: bounds of the sequences.
        cu_seqlens_k: the same tensor, or None: keys are of the same tokens.
        max_seqlen_q: as max_seqlen of nsa_attention; max_seqlen_k is not read.
        causal: must be True.

    Raises:
        InputError: as nsa_attention, or keys of other tokens than the queries'.
        BackendError: as nsa_attention.
    """
    if not causal:
        raise InputError("causal", causal, "use True: the branches are defined for causal attention alone")
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        fix = "give that of q itself, or None: queries and keys are of the same tokens"
        raise InputError("cu_seqlens_k", list(cu_seqlens_k.shape), fix)
    options = {"cu_seqlens": cu_seqlens_q, "max_seqlen": max_seqlen_q, "scale": softmax_scale, "backend": backend}
    return nsa_attention(q, k, v, gates, config or NSAConfig(), **options)


def compress(x: Tensor, config: NSAConfig, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """Mean of every compression block: token i of the result is the mean of x at [i·d, i·d + l).

    Args:
        x: keys or values [B,S,Hkv,D]; packed [total,Hkv,D].
        config: cmp_block, cmp_stride; compress must be "mean".
        cu_seqlens: bounds of packed sequences; no block crosses one.

    Returns:
        [B,Nc,Hkv,D] in x's dtype, Nc = max(0, (S - l)//d + 1); packed ones are concatenated. Sums are in float32
        (float64 for float64).

    Raises:
        InputError: a wrong shape, or a learned compression, which only the layer computes.
    """
    _check_compression(config, (None,))
    _inputs.check_sequence("x", x, cu_seqlens is not None)
    if _is_empty(x, cu_seqlens):
        return x if cu_seqlens is not None else x[:, : config.cmp_tokens(x.shape[1])]
    if cu_seqlens is None:
        return _block_means(x, config)
    spans = sequence_spans(cu_seqlens, x.shape[0])
    return torch.cat([_block_means(x[None, start:end], config)[0] for start, end in spans])


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, scale: float | None = None,
    window: int | None = None, backend: str = "auto", group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention over all positions <= t, or over the last `window` of them; differentiable.

    Args:
        q, k, v: queries [B,S,Hq,Dk], keys [B,T,Hkv,Dk], values [B,T,Hkv,Dv].
        cu_seqlens, scale, group: as in nsa_attention.
        window: positions that a query sees, its own included; all unless given.
        backend: the kernel, one of `backends.dense.KERNELS`; "auto" takes the fastest available.

    Returns:
        [B,S,Hq,Dv] (packed: [total,Hq,Dv]) in q's dtype. The kernel that ran is noted in `routes` as branch "dense".

    Raises:
        InputError: shapes, dtypes, devices, window or cu_seqlens that do not fit.
        BackendError: a kernel that is unknown, or cannot compute this here.
    """
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise InputError("window", repr(window), "use a whole number >= 1, or None for all positions")
    operands = Operands(q, (k, k, k), (v, v, v)).under_autocast()
    if group is not None and operands.q.numel() > 0:
        parts = context_parallel.parts(operands, NSAConfig(), group, cu_seqlens)
        options = {"scale": scale, "window": window, "backend": backend}
        return torch.cat([dense_attention(each.q, each.keys[0], each.values[0], **options) for each in parts], 1)
    operands.check(NSAConfig(), cu_seqlens is not None)
    if _is_empty(q, cu_seqlens):
        return operands.nothing()
    factor = _scale(scale, q)
    with _inputs.without_autocast(q):
        return dense.attention(operands.q, operands.keys[0], operands.values[0], factor, window, backend, cu_seqlens)


def _attention(
    operands: Operands, config: NSAConfig, branches: tuple[Branch, ...], cu_seqlens: Tensor | None,
    max_seqlen: int | None, scale: float | None, backend: str | Mapping[str, str], group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """Sum of `branches`, as nsa_attention and the doors below it have it."""
    operands = operands.under_autocast()
    if group is not None and operands.q.numel() > 0:
        parts = context_parallel.parts(operands, config, group, cu_seqlens)
        return torch.cat([_attention(part, config, branches, None, None, scale, backend) for part in parts], 1)
    operands.check(config, cu_seqlens is not None)
    check_blocks(operands, config, cu_seqlens)
    q, chooses = operands.q, "slc" in branches and operands.blocks is None
    steps: tuple[Branch, ...] = ("select", *branches) if chooses else branches
    backends = resolve(backend, steps, q.device, q.dtype, Heads.of(q, operands.keys[0], operands.values[0]))
    attend = partial(_attend, config=config, scale=_scale(scale, q), branches=branches, backends=backends)
    if _is_empty(q, cu_seqlens):
        return operands.nothing()
    by_kernels = all(each is triton for each in backends.values())
    return _through(attend, operands, config, cu_seqlens, max_seqlen, by_kernels)


def _through(
    compute: Callable[..., Tensor], operands: Operands, config: NSAConfig, cu_seqlens: Tensor | None,
    max_seqlen: int | None, by_kernels: bool,
) -> Tensor:  # fmt: skip
    """Result of `compute`, which takes a batch, for operands packed or not; the kernels take sequences as they are."""
    if max_seqlen is not None and cu_seqlens is None:
        raise InputError("max_seqlen", max_seqlen, "give it with cu_seqlens: it bounds packed sequences")
    with _inputs.without_autocast(operands.q):
        if cu_seqlens is None:
            return compute(operands)
        if by_kernels:
            bounds = checked_packing(operands, config, cu_seqlens, max_seqlen)
            return compute(operands.each(lambda x: x[None]), bounds=bounds)[0]
        return compute_packed(compute, operands, config, cu_seqlens, max_seqlen)


def _is_empty(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether x has no token, as on a rank that got none, after a check of its bounds if it is packed."""
    if x.numel() == 0 and cu_seqlens is not None:
        checked_bounds(cu_seqlens, len(x), x.device)
    return x.numel() == 0


def _check_compression(config: NSAConfig, needed: Sequence[Tensor | None]) -> None:
    """Raise InputError if one of the `needed` compressed tensors is missing and only the layer can make it."""
    if config.compress != "mean" and any(x is None for x in needed):
        fix = 'pass k_cmp and v_cmp, made by the layer\'s learned compression, or use compress="mean"'
        raise InputError("compress", repr(config.compress), fix)


def _attend(
    operands: Operands, config: NSAConfig, scale: float, branches: tuple[Branch, ...], backends: dict[Branch, Backend],
    bounds: tuple[Tensor, int] | None = None,
) -> Tensor:  # fmt: skip
    """Gated sum; triton computes its branches at once, also packed ones by their `bounds` of checked_packing."""
    given = (None,) * 3 if operands.gates is None else operands.gates.unbind(-1)
    gates: dict[Branch, Tensor | None] = dict(zip(BRANCHES, given, strict=True))
    parts: list[Tensor] = []
    remaining: tuple[Branch, ...] = branches
    while remaining:  # no dict of backends: torch.compile takes one module under two names for two keys
        backend = backends[remaining[0]]
        own: tuple[Branch, ...] = tuple(branch for branch in remaining if backends[branch] is backend)
        remaining = tuple(branch for branch in remaining if branch not in own)
        if backend is triton and ("slc" not in own or backends.get("select", triton) is triton):
            with profiled(own):
                parts.append(triton.attend(operands, config, own, scale, bounds))
        else:
            parts += [_branch(branch, operands, gates[branch], config, scale, backends) for branch in own]
    out = parts.pop(0)
    while parts:
        out += parts.pop(0)  # frees the part
    return out


def _branch(
    branch: Branch, operands: Operands, gate: Tensor | None, config: NSAConfig, scale: float,
    backends: dict[Branch, Backend],
) -> Tensor:  # fmt: skip
    q, keys, values = operands.q, operands.keys, operands.values
    with profiled((branch,)):
        if branch == "win":
            return backends["win"].window(q, keys[2], values[2], gate, config.window, scale)
        if branch == "slc":
            with torch.no_grad():
                blocks = operands.blocks
                blocks = _select(operands, config, scale, backends["select"]) if blocks is None else blocks
            return backends["slc"].selected(q, keys[1], values[1], gate, blocks, config, scale)
        k_cmp = compress(keys[0], config) if operands.k_cmp is None else operands.k_cmp
        v_cmp = compress(values[0], config) if operands.v_cmp is None else operands.v_cmp
        return backends["cmp"].compressed(q, k_cmp, v_cmp, gate, config, operands.offset, scale)


def _select(
    operands: Operands, config: NSAConfig, scale: float, backend: Backend, bounds: tuple[Tensor, int] | None = None
) -> Tensor:
    if bounds is not None:
        return triton.select_packed(operands, config, scale, *bounds)
    k_cmp = compress(operands.keys[0], config) if operands.k_cmp is None else operands.k_cmp
    with profiled(("select",)):
        return backend.select(operands.q, k_cmp, config, operands.offset, scale)


def _block_means(x: Tensor, config: NSAConfig) -> Tensor:
    """Means of x's blocks: tokens are summed to strides, strides to blocks, every block in the same order."""
    stride, tokens = config.cmp_stride, config.cmp_tokens(x.shape[1])
    if tokens == 0:
        return x[:, :0]
    per_block = config.cmp_block // stride
    used = x[:, : (tokens - 1 + per_block) * stride].unflatten(1, (-1, stride))
    strides = used.sum(2, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)
    blocks = sum((strides[:, i : i + tokens] for i in range(1, per_block)), strides[:, :tokens])
    return (blocks / config.cmp_block).to(x.dtype)


def ordered_branches(branches: Sequence[str]) -> tuple[Branch, ...]:
    """The named branches in the order of BRANCHES. Raises InputError for none, an unknown or a repeated name."""
    names = [branches] if isinstance(branches, str) else list(branches) if isinstance(branches, Iterable) else []
    if not names or any(name not in BRANCHES or names.count(name) > 1 for name in names):
        raise InputError("branches", repr(branches), f"name each at most once, at least one, of {', '.join(BRANCHES)}")
    return tuple(branch for branch in BRANCHES if branch in names)


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    if not isinstance(scale, Real) or isinstance(scale, bool) or not 0 < scale < math.inf:
        raise InputError("scale", repr(scale), f"give a finite number above 0, or None for 1/sqrt({q.shape[-1]})")
    return float(scale)
