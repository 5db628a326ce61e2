"""Peers: implementations of Native Sparse Attention from outside, each behind an adapter; the packages live elsewhere.

An adapter is one of `packages`, or an object that an installed distribution offers in the entry point group
`nsa_bench.peers`. It imports its package only when it is called, so that an adapter costs nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from jobs.adapters import packages
from jobs.measure.check import HeadShape
from jobs.schema.plain_text import error_in_a_line
from nsa_core import NSAConfig
from nsa_core.offers import Offer, offers


class Peer(Protocol):
    """An adapter."""

    @property
    def INSTALL(self) -> str:  # noqa: N802 - a constant of a module
        """How to install its package, in words."""
        ...

    def version(self) -> str:
        """Import the package; returns its version. Any exception is the reason why it cannot be used."""
        ...

    def incompatible(self, shape: HeadShape, config: NSAConfig, dtype: torch.dtype, device: str) -> str | None:
        """Reason why it does not compute such operands on a "cpu" or "cuda" device; None if it does."""
        ...

    def semantics(self, config: NSAConfig) -> NSAConfig | None:
        """Configuration of the attention that it computes when asked for `config`; None: dense causal attention."""
        ...

    def select(self, q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
        """Blocks [B,S,Hkv,n] that its `attend` chooses, in any order, padded with -1; not asked if it is dense."""
        ...

    def attend(self, inputs: Mapping[str, Tensor], config: NSAConfig, window_kernel: str | None) -> Tensor:
        """Output [B,S,Hq,D], differentiable.

        Args:
            inputs: q [B,S,Hq,D], k, v [B,S,Hkv,D] and, unless it is dense, gates: logits [B,S,Hq,3], cmp, slc, win.
            config: as given to `semantics`.
            window_kernel: flash kernel of the window, for peers that leave it to flash-attn; None: the fastest here.
        """
        ...


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "flash-linear-attention": packages.FlashLinearAttention(),
        "native-sparse-attention-triton": packages.NSATriton(),
        "Scalable-Flash-NSA": packages.ScalableFlashNSA(),
        "Flash-Sparse-Attention": packages.FlashSparseAttention(),
        "dense-pytorch": packages.DensePyTorch(),
    }
)


@cache
def offered_peers() -> tuple[Offer, ...]:
    """Adapters of other distributions, by name. Read once a process."""

    def problem(_name: str, peer: Any) -> str | None:
        parts = ("version", "incompatible", "semantics", "select", "attend")
        missing = [part for part in parts if not callable(getattr(peer, part, None))]
        missing += [] if isinstance(getattr(peer, "INSTALL", None), str) else ["INSTALL"]
        return f"lacks {', '.join(missing)}" if missing else None

    return tuple(offers("nsa_bench.peers", dict.fromkeys(PEERS, "nsa-bench itself has taken"), problem))


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
    return offer.load()


class PeerProblem(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A peer that cannot be used here; the message says why, and the fix."""


def load_peer(name: str) -> tuple[Peer, str]:
    """A peer, ready to be called, and its version. Raises PeerProblem."""
    peer = find_peer(name)
    try:
        return peer, str(peer.version())
    except ModuleNotFoundError as err:
        raise PeerProblem(f"the module {err.name!r} is not installed; {peer.INSTALL}") from err
    except (Exception, SystemExit) as err:
        raise PeerProblem(f"it cannot be imported ({error_in_a_line(err)}); {peer.INSTALL}") from err
