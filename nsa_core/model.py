"""A decoder-only transformer over Native Sparse Attention or dense attention, and named configurations of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from .cache import DenseCache, NSACache
from .config import NSAConfig
from .errors import InputError
from .functional import BRANCHES
from .layer import DenseAttention, NativeSparseAttention, check_branches, check_heads
from .loss import head_cross_entropy
from .packed_sequences import Packing
from .projections import in_compiled_training, product, side_by_side
from .routes import Branch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LayerCache = NSACache | DenseCache

# Rows of logits that the loss holds at a time.
LOSS_ROWS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """Shape of an NSATransformer.

    Attributes:
        vocab_size: tokens of the vocabulary.
        dim: width of the residual stream.
        layers: number of blocks.
        heads, kv_heads: query heads, and kv heads, a divisor of them.
        head_dim: head dim of queries, keys and values; even.
        ffn_dim: hidden width of SwiGLU.
        attention: "nsa" or "dense".
        nsa: the sparse attention's sizes; ignored for "dense".
        backend: as in `nsa_attention`; "auto" for "dense".
        tie_embeddings: the output head shares the embedding's weights.
        checkpointing: in training keep only each block's input, and recompute the block in the backward pass.
        rope_theta: RoPE's base.
        branches: branches of the sparse attention; the model has no weights for the others.

    Raises:
        InputError: a value is out of range, or does not fit the others.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    attention: Literal["nsa", "dense"] = "nsa"
    nsa: NSAConfig = field(default_factory=NSAConfig)
    backend: str | Mapping[str, str] = "auto"
    tie_embeddings: bool = True
    checkpointing: bool = False
    rope_theta: float = 10_000.0
    branches: tuple[Branch, ...] = BRANCHES

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "ffn_dim"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "use a whole number >= 1")
        check_heads(self.heads, self.kv_heads, self.head_dim)
        if self.attention not in ("nsa", "dense"):
            raise InputError("attention", repr(self.attention), 'use "nsa" or "dense"')
        if self.attention == "dense" and self.backend != "auto":
            raise InputError("backend", repr(self.backend), 'use "auto" with attention="dense": it has no other')
        if self.rope_theta <= 0:
            raise InputError("rope_theta", self.rope_theta, "use a number > 0")
        object.__setattr__(self, "branches", check_branches(self.branches, self.nsa))
        if self.attention == "dense" and self.branches != BRANCHES:
            raise InputError("branches", self.branches, 'leave it out with attention="dense": it has none')

    def under(self, implementation: str) -> ModelConfig:
        """The same model with dense attention, or with NSA by the backend of this name."""
        if implementation == "dense":
            return replace(self, attention="dense", backend="auto")
        return replace(self, attention="nsa", backend=implementation)


# For bytes as tokens: all branches have work from a few dozen tokens on.
_SMALL = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=16)
PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": ModelConfig(
            vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_dim=192, nsa=_SMALL
        ),
        # The shape of the M7C run, with the SwiGLU width that gives 125 million parameters.
        "m7c_125m": ModelConfig(
            vocab_size=50_304, dim=768, layers=12, heads=12, kv_heads=2, head_dim=64, ffn_dim=2_304
        ),
    }
)


class SwiGLU(nn.Module):
    """Feed-forward down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.gate, self.up)
        if in_compiled_training(x) and self.gate.out_features % 4 == 0:  # else `product` would pad columns
            from .kernels.training.swiglu import swiglu  # needs Triton

            return self.down(swiglu(product(x, layers)))
        gate, up = side_by_side(x, layers)
        gate = nn.functional.silu(gate)
        return self.down(gate * up)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        shape = (config.dim, config.heads, config.kv_heads, config.head_dim)
        if config.attention == "dense":
            self.attention = DenseAttention(*shape, rope_theta=config.rope_theta)
        else:
            self.attention = NativeSparseAttention(
                *shape, config.nsa, backend=config.backend, rope_theta=config.rope_theta, branches=config.branches
            )
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, cache: LayerCache | None = None, packing: Packing | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache, packing)
        return x + self.ffn(self.ffn_norm(x))


class NSATransformer(nn.Module):
    """Language model: tokens [B,S] to logits [B,S,vocab_size], or to the loss of predicting `targets`.

    Attributes:
        config: its shape.
        checkpointing_effective: whether the last forward pass really kept only the blocks' inputs: configured, in
            training mode, with gradients enabled and without a cache.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing_effective = False
        self.embedding = TokenEmbedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._initialise()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def new_cache(self, capacity: int | None = None) -> list[LayerCache]:
        """An empty cache for `forward`, one entry a layer, with room for `capacity` tokens from the start if given."""
        return [cast(Block, block).attention.new_cache(capacity) for block in self.blocks]

    def share_sequences(self, group: ProcessGroup | None) -> None:
        """Let the ranks of a group have each sequence together from now on: `forward` takes and gives their shares
        (context_parallel.share), and its loss is the mean over this rank's. None: each rank has whole sequences."""
        for block in self.blocks:
            cast(Block, block).attention.group = group

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cu_seqlens: Tensor | Packing | None = None, *,
        cache: list[LayerCache] | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [B,S,vocab_size] of every position, or the mean cross entropy [nat] where targets [B,S] are given.

        A target IGNORED (nsa_core.loss) has no part in the mean.

        With cu_seqlens, the bounds of documents in the flattened tokens (packed_sequences.document_bounds), none sees
        another: as NativeSparseAttention.forward.

        With a cache from `new_cache`, tokens continue those it holds, and are stored in it. The loss never holds all
        logits, so that memory grows with the hidden states alone.
        """
        rows = self.norm(self._through(self.embedding(tokens), 0, len(self.blocks), cu_seqlens, cache))
        if targets is None:
            return self.head(rows)
        return head_cross_entropy(rows.flatten(0, 1), self.head.weight, targets.flatten(), LOSS_ROWS)

    def lower(self, tokens: Tensor, depth: int, cu_seqlens: Tensor | Packing | None = None) -> Tensor:
        """Hidden states [B,S,dim] of tokens [B,S] after the first `depth` blocks."""
        return self._through(self.embedding(tokens), 0, depth, cu_seqlens)

    def upper(self, hidden: Tensor, depth: int, targets: Tensor, cu_seqlens: Tensor | Packing | None = None) -> Tensor:
        """Mean cross entropy [nat], as of `forward`, from the hidden states of `lower`."""
        hidden = self._through(hidden, depth, len(self.blocks), cu_seqlens)
        return head_cross_entropy(self.norm(hidden).flatten(0, 1), self.head.weight, targets.flatten(), LOSS_ROWS)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, *, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Tokens [B,S+count]: [B,S] continued by the likeliest ones, or by samples at a temperature > 0."""
        cache, new = self.new_cache(tokens.shape[1] + count), tokens
        for _ in range(count):
            logits = self.forward(new, cache=cache)[:, -1].float()
            if temperature > 0:
                new = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
            else:
                new = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, new), 1)
        return tokens

    def _through(
        self, x: Tensor, start: int, stop: int, cu_seqlens: Tensor | Packing | None,
        cache: list[LayerCache] | None = None,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B,S,dim] after the blocks start:stop."""
        self.checkpointing_effective = (
            self.config.checkpointing and self.training and torch.is_grad_enabled() and cache is None
        )
        packing = None
        if cu_seqlens is not None:
            packing = Packing.of(cu_seqlens, x.shape[0] * x.shape[1], x.device, self.config.nsa)
        for i, block in enumerate(list(self.blocks)[start:stop], start):
            if self.checkpointing_effective:
                x = checkpoint(block, x, None, packing, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, None if cache is None else cache[i], packing)
        return x

    def _initialise(self) -> None:
        """Draw normal weights of deviation 0.02, divided by sqrt(2·layers) in projections into the residual stream."""
        into_stream = ("out_proj", "ffn.down")
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                shrink = (2 * self.config.layers) ** 0.5 if name.endswith(into_stream) else 1.0
                nn.init.normal_(module.weight, std=0.02 / shrink)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


class TokenEmbedding(nn.Embedding):
    """Rows of the weight [V,D] for tokens [..]: [..,D]."""

    def forward(self, tokens: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _operator(tokens, self.weight)
        return embedding(tokens, self.weight)


def _embed_backward(dout: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Gradient [count,D] of the weight."""
    return torch.ops.aten.embedding_dense_backward(dout, tokens, count, -1, False)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    tokens, weight = inputs
    ctx.count = len(weight)
    ctx.save_for_backward(tokens)


def _grad(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
    (tokens,) = ctx.saved_tensors
    return None, _backward_operator(dout, tokens, ctx.count)


_operator = custom_op("nsa_core::embed", embedding, mutates_args=(), schema="(Tensor tokens, Tensor weight) -> Tensor")
_operator.register_fake(embedding)
_operator.register_autograd(_grad, setup_context=_keep)
_backward_operator = custom_op("nsa_core::embed_backward", _embed_backward, mutates_args=())
_backward_operator.register_fake(_embed_backward)
