"""Attention layers: Native Sparse Attention as the paper's model uses it, and dense attention to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from . import context_parallel
from ._inputs import Triple, without_autocast
from .cache import DenseCache, NSACache
from .config import NSAConfig
from .decode import dense_step, nsa_step, refuse_gradients
from .errors import InputError
from .functional import compress, dense_attention, nsa_attention, ordered_branches
from .packed_sequences import Packing
from .projections import in_compiled_training, product, side_by_side
from .rope import angles, rotate
from .routes import BRANCHES, Branch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LearnedCompression(nn.Module):
    """The paper's φ (Eq. 7): a block's tokens, each with a learned encoding of its place, through an MLP to one token.

    All kv heads share the weights.
    """

    def __init__(self, config: NSAConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.place = nn.Parameter(torch.zeros(config.cmp_block, head_dim))
        self.up = nn.Linear(config.cmp_block * head_dim, 2 * head_dim)
        self.down = nn.Linear(2 * head_dim, head_dim)
        nn.init.normal_(self.place, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Compressed tokens [B,Nc,Hkv,D] of x [B,S,Hkv,D]; Nc = 0 while S < cmp_block.

        Overlapping blocks are not unfolded: one product gives each stride's contribution to every block that contains
        it, and a block is the sum of its strides' contributions. The place encodings are the same in every block, so
        they go into the bias.
        """
        tokens, stride = self.config.cmp_tokens(x.shape[1]), self.config.cmp_stride
        if tokens == 0:
            return x[:, :0]
        parts = self.config.cmp_block // stride
        strides = x[:, : (tokens - 1 + parts) * stride].unflatten(1, (-1, stride)).transpose(2, 3).flatten(-2)
        weight = self.up.weight.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 1)  # [parts·2D, stride·D]
        added = nn.functional.linear(strides, weight).unflatten(-1, (parts, -1))  # [B,strides,Hkv,parts,2D]
        blocks = sum((added[:, i : i + tokens, :, i] for i in range(1, parts)), added[:, :tokens, :, 0])
        with without_autocast(x):
            bias = self.up.bias + self.up.weight @ self.place.flatten()
        return self.down(nn.functional.silu(blocks + bias.to(blocks.dtype)))


class NativeSparseAttention(nn.Module):
    """Self-attention [B,S,dim] -> [B,S,dim] over three branches, each with keys and values of its own.

    q and the keys of the selected and window branches are rotated (RoPE). The compressed branch's keys are compressed
    first, then rotated to the position of their block's first token. Gates are a sigmoid of a linear map of the input.

    Args:
        dim: width of the model.
        heads, kv_heads: query heads, and kv heads, a divisor of them.
        head_dim: head dim of queries, keys and values; even.
        config: block sizes, counts, the window, and the kind of compression.
        backend: as in `nsa_attention`.
        rope_theta: RoPE's base.
        branches: the branches to compute. The layer has no weights for the others; it decodes only with all three.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, config: NSAConfig | None = None, *,
        backend: str | Mapping[str, str] = "auto", rope_theta: float = 10_000.0, branches: Sequence[str] = BRANCHES,
    ) -> None:  # fmt: skip
        super().__init__()
        check_heads(heads, kv_heads, head_dim)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.config = config or NSAConfig()
        self.backend, self.rope_theta = backend, rope_theta
        self.branches = check_branches(branches, self.config)
        self.group: ProcessGroup | None = None  # the ranks that have each sequence together (context_parallel)
        # The selection scores the compressed keys.
        needed = {*self.branches, "cmp"} if "slc" in self.branches else {*self.branches}
        self._keyed: tuple[Branch, ...] = tuple(name for name in BRANCHES if name in needed)
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, len(self._keyed) * kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, len(self.branches) * kv_heads * head_dim, bias=False)
        self.gate_proj = nn.Linear(dim, len(self.branches) * heads)
        self.out_proj = nn.Linear(heads * head_dim, dim, bias=False)
        if self.config.compress == "mlp" and "cmp" in self.branches:
            self.compress_k = LearnedCompression(self.config, head_dim)
            self.compress_v = LearnedCompression(self.config, head_dim)

    def new_cache(self, capacity: int | None = None) -> NSACache:
        """An empty cache for `forward`, with room for `capacity` tokens from the start if given."""
        return NSACache(self.config, capacity)

    def forward(self, x: Tensor, cache: NSACache | None = None, cu_seqlens: Tensor | Packing | None = None) -> Tensor:
        """Attend from every position of x [B,S,dim] to itself and those before it.

        With a cache, x continues its tokens and is stored in it. Several tokens are a prefill, of an empty cache or
        behind what it holds, and one there is a step of decoding; behind a cache no gradients are computed.

        Args:
            cu_seqlens: bounds, int32 [sequences + 1], of sequences packed into the B·S tokens; none sees another, and
                positions begin with each. Several layers share a Packing of them.

        Raises:
            InputError: the cache has no room for x, holds other sequences, or has tokens and gradients are enabled; it
                is left unchanged. Or the layer lacks a branch, or cu_seqlens are no bounds, or given with a cache.
        """
        if cache is not None and self.branches != BRANCHES:
            raise InputError("branches", self.branches, "use all three to decode with a cache")
        _check_call(x, cache, cu_seqlens, self.group)
        if cache is not None:
            if cache.length > 0 and x.shape[1] > 1:
                return self.out_proj(self._continued(x, cache).flatten(2))
            if cache.length > 0:
                select = self.backend if isinstance(self.backend, str) else self.backend.get("select", "auto")
                heads = self._heads_of(x)
                out = nsa_step(*heads, cache, theta=self.rope_theta, compress=self._compress, backend=select)
                return self.out_proj(out.flatten(2))
        if cu_seqlens is not None:
            packing = Packing.of(cu_seqlens, x.shape[0] * x.shape[1], x.device, self.config)
            return self.out_proj(self._packed(x.flatten(0, 1)[None], packing).flatten(-2)).view(x.shape)
        q, k, v, gates = self._project(x, context_parallel.positions(x.shape[1], self.group, x.device))
        k_cmp, v_cmp = None, None
        if "cmp" in self.branches:
            whole_k, whole_v = context_parallel.gather((k[0], v[0]), self.group)
            k_cmp, v_cmp = self._compress(whole_k, whole_v, 0)
        elif "slc" in self.branches:  # the selection needs no value
            k_cmp = self._rotated(compress(context_parallel.gather((k[0],), self.group)[0], self.config), 0)
        sides, options = (q, k, v, gates, self.config), {"backend": self.backend, "branches": self.branches}
        out = nsa_attention(*sides, k_cmp=k_cmp, v_cmp=v_cmp, group=self.group, **options)
        if cache is not None:
            assert k_cmp is not None, "a layer that decodes compresses"
            assert v_cmp is not None
            cache.take(k, v)
            cache.add_compressed(k_cmp, v_cmp)
        return self.out_proj(out.flatten(2))

    def _continued(self, x: Tensor, cache: NSACache) -> Tensor:
        """Attention [B,S,Hq,D] of several tokens behind those of the cache, which takes them."""
        cache.recount()
        q, k, v, gates = self._project(x, cache.length + torch.arange(x.shape[1], device=x.device))
        refuse_gradients(q, *k, *v, gates)
        cache.make_room(k[0])
        news = (cache.k_open, k[0]), (cache.v_open, v[0]), (cache.k_win, k[2]), (cache.v_win, v[2])
        k_open, v_open, k_win, v_win = (torch.cat((held.in_order(), new), 1) for held, new in news)
        first = cache.k_cmp.length * self.config.cmp_stride  # token of the next compressed one
        cache.take(k, v)
        at = first - (cache.length - k_open.shape[1])
        cache.add_compressed(*self._compress(k_open[:, at:], v_open[:, at:], first))
        keys, values, k_cmp, v_cmp = (y.values() for y in (cache.k_slc, cache.v_slc, cache.k_cmp, cache.v_cmp))

        def attend(branches: Sequence[str], k: Tensor, v: Tensor, *cmp: Tensor) -> Tensor:
            backend = self.backend
            if not isinstance(backend, str):
                backend = {name: each for name, each in backend.items() if (name == "win") == (branches == ("win",))}
            k_cmp, v_cmp = cmp or (None, None)
            options = {"k_cmp": k_cmp, "v_cmp": v_cmp, "backend": backend, "branches": branches}
            return nsa_attention(q, k, v, gates, self.config, **options)

        return attend(("win",), k_win, v_win) + attend(("cmp", "slc"), keys, values, k_cmp, v_cmp)

    def _packed(self, x: Tensor, packing: Packing) -> Tensor:
        """Attention [total,Hq,D] of sequences packed into x [1,total,dim]."""
        q, k, v, gates = self._project(x, packing.positions)
        k_cmp, v_cmp = None, None
        if self.branches != ("win",):  # each block is a sequence of its own, of which one compressed token is made
            blocks = k[0][0][packing.blocks], v[0][0][packing.blocks]
            k_cmp, v_cmp = (y[:, 0] for y in self._compress(*blocks, packing.positions[packing.blocks[:, :1]]))
        keys, values = (cast(Triple, tuple(y[0] for y in each)) for each in (k, v))
        options = {"cu_seqlens": packing.bounds, "max_seqlen": packing.longest, "branches": self.branches}
        operands = q[0], keys, values, gates[0], self.config
        return nsa_attention(*operands, k_cmp=k_cmp, v_cmp=v_cmp, backend=self.backend, **options)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Triple, Triple, Tensor]:
        """Rotated q [B,S,Hq,D]; three keys (cmp's unrotated) and values [B,S,Hkv,D]; gates [B,S,Hq,3].

        In the place of a branch that is not computed is another one's, which nothing reads there.
        """
        cos, sin = angles(positions, self.head_dim, self.rope_theta, x.dtype)
        if in_compiled_training(x) and self.branches == BRANCHES:
            from .kernels.training.heads import split_heads  # needs Triton

            bias = self.gate_proj.bias
            joined = product(x, (self.q_proj, self.k_proj, self.v_proj, self.gate_proj))
            parts = split_heads(joined, bias, cos, sin, self.heads, self.kv_heads)
            q, k_cmp, k_slc, k_win, v_cmp, v_slc, v_win, gates = parts
            return q, (k_cmp, k_slc, k_win), (v_cmp, v_slc, v_win), gates
        q, k, v, gates = self._heads_of(x)
        keys = [y if name == "cmp" else rotate(y, cos, sin) for name, y in zip(self._keyed, k.unbind(2), strict=True)]
        gates = torch.sigmoid(gates)
        if self.branches != BRANCHES:
            gates = torch.stack(_in_places(gates.unbind(-1), self.branches), -1)
        values = _in_places(v.unbind(2), self.branches)
        return rotate(q, cos, sin), _in_places(keys, self._keyed), values, gates

    def _heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Unrotated q [B,S,Hq,D], k and v [B,S,n,Hkv,D] of the n branches that have some, gate logits [B,S,Hq,n]."""
        q, k, v, gates = side_by_side(x, (self.q_proj, self.k_proj, self.v_proj, self.gate_proj))
        k, v = (y.unflatten(-1, (-1, self.kv_heads, self.head_dim)) for y in (k, v))
        return q.unflatten(-1, (self.heads, self.head_dim)), k, v, gates.unflatten(-1, (self.heads, -1))

    def _compress(self, k: Tensor, v: Tensor, position: Tensor | int) -> tuple[Tensor, Tensor]:
        """Compressed keys, rotated, and values of tokens [B,T,Hkv,D], the first at `position`, one or [B,1]."""
        if self.config.compress == "mlp":
            k_cmp, v_cmp = self.compress_k(k), self.compress_v(v)
        elif in_compiled_training(k):
            from .kernels import operators  # needs Triton

            k_cmp, v_cmp = operators.compress(k, v, self.config)
        else:
            k_cmp, v_cmp = compress(k, self.config), compress(v, self.config)
        return self._rotated(k_cmp, position), v_cmp

    def _rotated(self, k_cmp: Tensor, position: Tensor | int) -> Tensor:
        """Compressed keys, each rotated to the position of its block's first token."""
        starts = torch.arange(k_cmp.shape[1], device=k_cmp.device) * self.config.cmp_stride + position
        return rotate(k_cmp, *angles(starts, self.head_dim, self.rope_theta, k_cmp.dtype))


class DenseAttention(nn.Module):
    """Causal self-attention [B,S,dim] -> [B,S,dim] with RoPE and grouped kv heads; arguments as the sparse layer's."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int, *, rope_theta: float = 10_000.0) -> None:
        super().__init__()
        check_heads(heads, kv_heads, head_dim)
        self.head_dim, self.rope_theta = head_dim, rope_theta
        self.group: ProcessGroup | None = None  # as of NativeSparseAttention
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def new_cache(self, capacity: int | None = None) -> DenseCache:
        return DenseCache(capacity)

    def forward(self, x: Tensor, cache: DenseCache | None = None, cu_seqlens: Tensor | Packing | None = None) -> Tensor:
        """Attend as NativeSparseAttention.forward, densely."""
        _check_call(x, cache, cu_seqlens, self.group)
        heads = side_by_side(x, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in heads)  # [B,S,heads,D]
        behind = cache if cache is not None and cache.length > 0 else None
        if behind is not None and x.shape[1] == 1:
            return self.out_proj(dense_step(q, k, v, behind, theta=self.rope_theta).flatten(2))
        bounds, positions = None, context_parallel.positions(x.shape[1], self.group, x.device)
        if behind is not None:
            refuse_gradients(q, k, v)
            behind.recount()
            behind.make_room(k)
            positions += behind.length
        if cu_seqlens is not None:
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
            packing = Packing.of(cu_seqlens, len(q), x.device, NSAConfig())
            bounds, positions = packing.bounds, packing.positions
        cos, sin = angles(positions, self.head_dim, self.rope_theta, q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            cache.take(k, v)
        if behind is not None:
            k, v = behind.k.values(), behind.v.values()
        out = dense_attention(q, k, v, cu_seqlens=bounds, group=self.group)
        return self.out_proj(out.reshape(*x.shape[:2], out.shape[-2] * out.shape[-1]))  # -1 takes no empty batch


def _check_call(
    x: Tensor, cache: NSACache | DenseCache | None, cu_seqlens: Tensor | Packing | None, group: ProcessGroup | None
) -> None:
    """Raise InputError if the cache has no room for x, or sequences are packed or shared where they cannot be."""
    if group is not None and not (cache is None and cu_seqlens is None):
        fix = "leave out cache and cu_seqlens: only whole batches are shared"
        raise InputError("group", f"{group.size()} ranks", fix)
    if cache is None:
        return
    if cu_seqlens is not None:
        given = cu_seqlens.bounds if isinstance(cu_seqlens, Packing) else cu_seqlens
        raise InputError("cu_seqlens", list(given.shape), "leave it out: a cache holds a batch, nothing packed")
    cache.check(*x.shape[:2])


def check_branches(branches: Sequence[str], config: NSAConfig) -> tuple[Branch, ...]:
    """The branches of a layer, in order. Raises InputError for names or a compression that a layer cannot have."""
    ordered = ordered_branches(branches)
    if config.compress == "mlp" and "slc" in ordered and "cmp" not in ordered:
        fix = 'add "cmp", or use compress="mean": no gradient flows through the selection to a learned compression'
        raise InputError("branches", ordered, fix)
    return ordered


def _in_places(found: Sequence[Tensor], names: Sequence[Branch]) -> Triple:
    """One tensor for each of BRANCHES: the named one's, or any in the place of one that is missing."""
    cmp, slc, win = (found[names.index(name)] if name in names else found[0] for name in BRANCHES)
    return cmp, slc, win


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raise InputError for numbers of heads or a head dim that attention with RoPE cannot use."""
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if value < 1:
            raise InputError(name, value, "use a whole number >= 1")
    if heads % kv_heads:
        raise InputError("kv_heads", kv_heads, f"use a divisor of heads = {heads}")
    if head_dim % 2:
        raise InputError("head_dim", head_dim, "use an even number: RoPE rotates pairs")
