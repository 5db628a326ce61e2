"""Peers: implementations of Native Sparse Attention from outside, each behind an adapter; the packages live elsewhere.

An adapter is one of these, or an object that an installed distribution offers in the entry point group
`nsa_bench.peers`. It imports its package only when it is called, so that an adapter costs nothing without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jobs.schema.plain_text import error_in_a_line
from jobs.specs.fields import HeadsSpec
from nsa_core import NSAConfig
from nsa_core.backends import flash
from nsa_core.offers import Offer, offers
from nsa_core.routes import note

TORCH_FIXED = "torch-fixed"  # of sequences of one length, which PyTorch offers no public function with a window for


class Peer(ABC):
    """An adapter; by itself of kernels for halves on CUDA. An object of another distribution, such as a module, needs
    INSTALL and the five methods."""

    INSTALL: ClassVar[str]  # how to install its package, in words
    DISTRIBUTION: ClassVar[str]
    MODULES: ClassVar[tuple[str, ...]]  # to import; the first one has the operators

    def version(self) -> str:
        """Import the package; returns its version. Any exception is the reason why it cannot be used."""
        for module in self.MODULES:
            import_module(module)
        try:
            return metadata.version(self.DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return "a checkout"

    def incompatible(self, shape: HeadsSpec, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
        """Reason why it does not compute such operands on a "cpu" or "cuda" device; None if it does."""
        if device != "cuda":
            return f"it runs on cuda, not on the {device}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        return None

    def semantics(self, config: NSAConfig) -> NSAConfig | None:
        """Configuration of the attention that it computes when asked for `config`; None: dense causal attention."""
        return config

    def select(self, q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
        """Blocks [B,S,Hkv,n] that its `attend` chooses, in any order, padded with -1. Not called if it is dense."""
        raise TypeError(f"{type(self).__name__}: dense attention chooses no blocks")

    @abstractmethod
    def attend(self, inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
        """Output [B,S,Hq,D], differentiable, of q [B,S,Hq,D], k, v [B,S,Hkv,D] and, unless it is dense, gates: logits
        [B,S,Hq,3] of cmp, slc, win. Peers that leave the window to flash-attn use the kernel; None: the fastest here.
        """


class DensePyTorch(Peer):
    """PyTorch's scaled_dot_product_attention: dense causal attention, the baseline, which runs everywhere."""

    INSTALL = "pip install torch"
    DISTRIBUTION = "torch"
    MODULES = ("torch",)

    def version(self) -> str:
        return torch.__version__  # with CUDA's, unlike that of the distribution

    def incompatible(self, shape: HeadsSpec, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
        return None

    def semantics(self, config: NSAConfig) -> NSAConfig | None:
        return None

    def attend(self, inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
        note("dense", "sdpa")
        q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k", "v"))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class FlashLinearAttention(Peer):
    """flash-linear-attention's parallel_nsa (github.com/fla-org/flash-linear-attention, package fla-core).

    It pools keys and values without overlap, in blocks as long as the selected ones, and always selects the first block
    and the last two: its oracle is the attention of such a configuration, a smaller problem than the paper's.
    """

    INSTALL = "pip install fla-core einops"
    DISTRIBUTION = "fla-core"
    MODULES = ("fla.ops.nsa.parallel",)

    def incompatible(self, shape: HeadsSpec, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
        group = shape.query_heads // shape.kv_heads
        if group < 16 or not _is_power_of_two(group):
            return f"its groups of query heads are powers of two from 16 on, not {group}"
        if not _is_power_of_two(config.slc_count) or config.slc_block < 2 * config.slc_count:
            return f"it selects a power of two of blocks, at most half as many as slc_block, not {config.slc_count}"
        if not _is_power_of_two(config.slc_block):
            return f"its blocks are powers of two, not {config.slc_block} tokens"
        if (config.init_blocks, config.local_blocks) != (1, 2):
            return "it always selects the first block and the last two: use init_blocks: 1, local_blocks: 2"
        return super().incompatible(shape, config, dtype, device)

    def semantics(self, config: NSAConfig) -> NSAConfig | None:
        return replace(config, cmp_block=config.slc_block, cmp_stride=config.slc_block)

    def select(self, q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
        nsa, block, scale = import_module(self.MODULES[0]), config.slc_block, q.shape[-1] ** -0.5
        pooled = [nsa.mean_pooling(x, block, None) for x in (k, v)]
        _, lse = nsa.parallel_nsa_compression(q, *pooled, TK=k.shape[1], block_size=block, scale=scale)
        return nsa.parallel_nsa_topk(
            q=q, k=pooled[0], TK=k.shape[1], lse=lse, block_counts=config.slc_count, block_size=block, scale=scale
        )

    def attend(self, inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        cmp, slc, win = torch.sigmoid(inputs["gates"]).unbind(-1)
        for branch in ("cmp", "select", "slc"):
            note(branch, "flash-linear-attention")
        out = import_module(self.MODULES[0]).parallel_nsa(
            q, k, v, cmp, slc, None, block_counts=config.slc_count, block_size=config.slc_block
        )
        return torch.addcmul(out, window(q, k, v, config, window_kernel), win.unsqueeze(-1))


class NSATriton(Peer):
    """native-sparse-attention-triton's operators (github.com/XunhaoLai/native-sparse-attention-triton)."""

    INSTALL = "pip install git+https://github.com/XunhaoLai/native-sparse-attention-triton einops"
    DISTRIBUTION = "native-sparse-attention-triton"
    MODULES = ("native_sparse_attention.ops",)
    NAME = "native-sparse-attention-triton"  # in routes
    WIDEST = 128
    SMALL_GROUPS: ClassVar[str | None] = None  # module of another selected branch, of groups of at most 8 query heads

    def incompatible(self, shape: HeadsSpec, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
        if shape.head_dim > self.WIDEST:
            return f"its head dims are at most {self.WIDEST}, not {shape.head_dim}"
        if config.slc_block not in (32, 64, 128, 256):
            return f"its selected blocks have 32, 64, 128 or 256 tokens, not {config.slc_block}"
        if config.cmp_block not in (16, 32, 64, 128):
            return f"its compressed blocks have 16, 32, 64 or 128 tokens, not {config.cmp_block}"
        return super().incompatible(shape, config, dtype, device)

    def select(self, q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
        with torch.no_grad():
            _, blocks, _ = self._compressed((q, k, v), config)
        return blocks.transpose(0, 1).unflatten(0, (q.shape[0], -1))

    def attend(self, inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
        qkv = q, k, v = inputs["q"], inputs["k"], inputs["v"]
        kernel, selected = self.NAME, import_module(self.MODULES[0]).topk_sparse_attention
        if self.SMALL_GROUPS is not None and q.shape[2] // k.shape[2] <= 8:
            kernel, selected = "fsa", import_module(self.SMALL_GROUPS).FSA_topk_sparse_attention
        note("cmp", self.NAME)
        note("select", self.NAME)
        note("slc", kernel)
        cmp, blocks, starts = self._compressed(qkv, config)
        slc = selected(*(x.flatten(0, 1) for x in qkv), blocks, config.slc_block, starts, None)
        win = window(q, k, v, config, window_kernel)
        gates = torch.sigmoid(inputs["gates"]).unsqueeze(-1).unbind(-2)
        return gates[0] * cmp.view_as(q) + gates[1] * slc.view_as(q) + gates[2] * win

    def _compressed(self, qkv: tuple[Tensor, Tensor, Tensor], config: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
        """Compressed branch [B*S,Hq,D] of flat sequences, blocks [Hkv,B*S,n] and the sequences' bounds."""
        ops, (batch, seq_len) = import_module(self.MODULES[0]), qkv[0].shape[:2]
        q, k, v = (x.flatten(0, 1) for x in qkv)
        starts = _bounds(batch, seq_len, q.device)
        k_cmp, starts_cmp = ops.avgpool_compress(k, None, starts, config.cmp_block, config.cmp_stride)
        v_cmp, _ = ops.avgpool_compress(v, None, starts, config.cmp_block, config.cmp_stride)
        out, blocks = ops.compressed_attention(
            q, k_cmp, v_cmp, config.cmp_block, config.cmp_stride, config.slc_block, config.slc_count, starts,
            starts_cmp, seq_len, config.cmp_tokens(seq_len), None, config.init_blocks, config.local_blocks,
        )  # fmt: skip
        return out, blocks, starts


class FlashSparseAttention(NSATriton):
    """Flash-Sparse-Attention's operators (github.com/Relaxed-System-Lab/Flash-Sparse-Attention).

    Its compressed branch, and the selected one of groups of more than 8 query heads, come from the reference in it
    (`nsa_ref`), which has NSATriton's operators and rounds the blocks' scores to bfloat16 before it chooses.
    """

    INSTALL = (
        "put a checkout of https://github.com/Relaxed-System-Lab/Flash-Sparse-Attention on PYTHONPATH, with einops"
    )
    DISTRIBUTION = "flash-sparse-attention"
    MODULES = ("nsa_ref.ops", "fsa.ops")
    NAME = "nsa_ref"
    WIDEST = 256
    SMALL_GROUPS = "fsa.ops"


class ScalableFlashNSA(Peer):
    """Scalable-Flash-NSA's operators (github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, flash_nsa).

    They follow each other as in its HFNSACore. It keeps the blocks' scores in float16, cubed, before it chooses.
    """

    INSTALL = "pip install git+https://github.com/mdy666/Scalable-Flash-Native-Sparse-Attention 'setuptools<81'"
    DISTRIBUTION = "flash-nsa"
    MODULES = ("flash_nsa", "flash_nsa.ops.combine")

    def incompatible(self, shape: HeadsSpec, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
        if not _is_power_of_two(shape.head_dim):
            return f"its head dims are powers of two, not {shape.head_dim}"
        if not _is_power_of_two(config.cmp_stride):
            return f"its strides are powers of two, not {config.cmp_stride}"
        return super().incompatible(shape, config, dtype, device)

    def select(self, q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
        with torch.no_grad():
            _, _, blocks = self._compressed((q, k, v), config)
        absent = blocks >= config.slc_blocks(q.shape[1])
        return blocks.masked_fill(absent, -1).transpose(0, 1).unflatten(0, (q.shape[0], -1))

    def attend(self, inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
        qkv = inputs["q"], inputs["k"], inputs["v"]
        for branch in ("cmp", "select", "slc"):
            note(branch, "Scalable-Flash-NSA")
        cmp, scale, blocks = self._compressed(qkv, config)
        slc = import_module(self.MODULES[0]).select_attn(*(x.flatten(0, 1) for x in qkv), blocks, sm_scale=scale)
        win = window(*qkv, config, window_kernel).flatten(0, 1)
        combine = import_module("flash_nsa.ops.combine").fused_sigmoid_combine
        return combine(cmp, slc, win, inputs["gates"].flatten(0, 1)).view_as(qkv[0])

    def _compressed(self, qkv: tuple[Tensor, Tensor, Tensor], config: NSAConfig) -> tuple[Tensor, float, Tensor]:
        """Compressed branch [B*S,Hq,D] of flat sequences, the scale, and blocks [Hkv,B*S,n], too high if absent."""
        nsa, (batch, seq_len) = import_module(self.MODULES[0]), qkv[0].shape[:2]
        q, k, v = (x.flatten(0, 1) for x in qkv)
        nsa.NSAHelper.set_hyperparameters(
            kernel_size=config.cmp_block,
            stride=config.cmp_stride,
            block_size=config.slc_block,
            window_size=config.window,
            top_n=config.slc_count,
            num_init_blocks=config.init_blocks,
            num_local_blocks=config.local_blocks,
        )
        nsa.NSAHelper.init_cu_seqlens(_bounds(batch, seq_len, q.device))
        scale = q.shape[-1] ** -0.5
        k_cmp, v_cmp = nsa.mean_pooling(k), nsa.mean_pooling(v)
        out, lse = nsa.compress_attn(q, k_cmp, v_cmp, sm_scale=scale)
        blocks, _ = nsa.slc_topk_indices(q, k_cmp, lse, sm_scale=scale, maybe_efficient_version=True, scale_slc_p=True)
        return out, scale, blocks


def window(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, kernel: str | None) -> Tensor:
    """Window branch [B,S,Hq,D] over `config.window` positions, the query's own included, by a flash kernel."""
    scale = q.shape[-1] ** -0.5
    if kernel != TORCH_FIXED:
        return flash.window(q, k, v, None, config.window, scale, kernel)
    note("win", TORCH_FIXED)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False,
        scale=scale, window_size_left=config.window - 1, window_size_right=0,
    )[0]  # fmt: skip


@lru_cache(maxsize=8)
def _bounds(batch: int, seq_len: int, device: torch.device) -> Tensor:
    """Bounds [batch + 1], int32, of sequences of one length that follow each other."""
    return torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device=device)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "flash-linear-attention": FlashLinearAttention(),
        "native-sparse-attention-triton": NSATriton(),
        "Scalable-Flash-NSA": ScalableFlashNSA(),
        "Flash-Sparse-Attention": FlashSparseAttention(),
        "dense-pytorch": DensePyTorch(),
    }
)


class PeerProblem(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A peer that cannot be used here; the message says why, and the fix."""


@cache
def offered_peers() -> tuple[Offer, ...]:
    """Adapters of other distributions, by name. Read once a process."""

    def lacks(_name: str, peer: Any) -> str | None:
        parts = ("version", "incompatible", "semantics", "select", "attend")
        missing = [part for part in parts if not callable(getattr(peer, part, None))]
        missing += [] if isinstance(getattr(peer, "INSTALL", None), str) else ["INSTALL"]
        return f"lacks {', '.join(missing)}" if missing else None

    return tuple(offers("nsa_bench.peers", dict.fromkeys(PEERS, "nsa-bench itself has taken"), lacks))


def peer_names() -> list[str]:
    """All peers, those whose adapter cannot be used included."""
    return list(dict.fromkeys([*PEERS, *(offer.name for offer in offered_peers())]))


def find_peer(name: str) -> Peer:
    """The adapter of a name in `peer_names`. Raises PeerProblem if it cannot be used."""
    if name in PEERS:
        return PEERS[name]
    offer = next(offer for offer in offered_peers() if offer.name == name)
    if (problem := offer.problem) is not None:
        by = f"{offer.package} {offer.version}"
        raise PeerProblem(f"{by}, which offers it, {problem}; mend or uninstall {offer.package}")
    return offer.entry.load()


def load_peer(name: str) -> tuple[Peer, str]:
    """A peer, ready to be called, and its version. Raises PeerProblem."""
    peer = find_peer(name)
    try:
        return peer, str(peer.version())
    except ModuleNotFoundError as err:
        raise PeerProblem(f"the module {err.name!r} is not installed; {peer.INSTALL}") from err
    except (Exception, SystemExit) as err:
        raise PeerProblem(f"it cannot be imported ({error_in_a_line(err)}); {peer.INSTALL}") from err
