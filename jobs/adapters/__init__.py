"""Peers: implementations of Native Sparse Attention from outside, each behind an adapter; the packages live elsewhere.

An adapter is one of `packages`, or an object that an installed distribution offers in the entry point group
`nsa_bench.peers`. It imports its package only when it is called, so that an adapter costs nothing without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from jobs.adapters import packages
from jobs.adapters.packages import Peer
from jobs.schema.plain_text import error_in_a_line
from nsa_core.offers import Offer, offers

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "flash-linear-attention": packages.FlashLinearAttention(),
        "native-sparse-attention-triton": packages.NSATriton(),
        "Scalable-Flash-NSA": packages.ScalableFlashNSA(),
        "Flash-Sparse-Attention": packages.FlashSparseAttention(),
        "dense-pytorch": packages.DensePyTorch(),
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
