"""Peers: implementations of Native Sparse Attention from outside, each behind an adapter; the packages live elsewhere.

An adapter is a module here, or an object that an installed distribution offers in the entry point group
`nsa_bench.peers`. It imports its package only when it is asked to, so that an adapter costs nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from jobs.adapters import flash_linear_attention, flash_sparse_attention, nsa_triton, pytorch, scalable_flash_nsa
from jobs.measure.check import HeadShape
from jobs.specs.kinds import distribution
from nsa_core import NSAConfig

GROUP = "nsa_bench.peers"


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
        "flash-linear-attention": flash_linear_attention,
        "native-sparse-attention-triton": nsa_triton,
        "Scalable-Flash-NSA": scalable_flash_nsa,
        "Flash-Sparse-Attention": flash_sparse_attention,
        "dense-pytorch": pytorch,
    }
)
_PARTS = ("version", "incompatible", "semantics", "select", "attend")


@dataclass(frozen=True)
class OfferedPeer:
    """An adapter of another distribution.

    Attributes:
        name: the peer.
        package, version: of the distribution.
        peer: the adapter; None if it cannot be used.
        problem: why it cannot be used; None if it can.
    """

    name: str
    package: str
    version: str
    peer: Peer | None
    problem: str | None


@cache
def offered_peers() -> tuple[OfferedPeer, ...]:
    """Adapters of other distributions, by name, with their problems. Read once a process."""
    found: list[OfferedPeer] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, *distribution(entry))):
        package, version = distribution(entry)
        taken = (
            "nsa-bench itself"
            if entry.name in PEERS
            else next((o.package for o in found if o.name == entry.name), None)
        )
        peer, problem = (None, f"has a name that {taken} has taken") if taken else _load(entry)
        found.append(OfferedPeer(entry.name, package, version, peer, problem))
    return tuple(found)


def peer_names() -> list[str]:
    """All peers, those whose adapter cannot be used included."""
    return list(dict.fromkeys([*PEERS, *(one.name for one in offered_peers())]))


def find_peer(name: str) -> Peer:
    """The adapter of a name in `peer_names`. Raises PeerProblem if it cannot be used."""
    if name in PEERS:
        return PEERS[name]
    one = next(one for one in offered_peers() if one.name == name)
    if one.peer is None:
        raise PeerProblem(
            f"{one.package} {one.version}, which offers it, {one.problem}; mend or uninstall {one.package}"
        )
    return one.peer


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
        raise PeerProblem(f"it cannot be imported ({in_words(err)}); {peer.INSTALL}") from err


def in_words(err: BaseException) -> str:
    """Type and first line of an exception."""
    first, *_ = str(err).strip().splitlines() or [""]
    return f"{type(err).__name__}: {first}"


def _load(entry: EntryPoint) -> tuple[Peer | None, str | None]:
    """The adapter and no problem, or no adapter and why."""
    try:
        peer: Any = entry.load()
    except (Exception, SystemExit) as err:
        return None, f"cannot be imported ({in_words(err)})"
    missing = [part for part in _PARTS if not callable(getattr(peer, part, None))]
    missing += [] if isinstance(getattr(peer, "INSTALL", None), str) else ["INSTALL"]
    return (None, f"lacks {', '.join(missing)}") if missing else (cast(Peer, peer), None)
