"""The backends, which compute the branches, one file each, and the choice among them.

Other distributions offer more in the entry point group `nsa_bench.implementations`: objects of the protocol `Backend`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .. import reference
from .._decorators import constant
from ..config import NSAConfig
from ..errors import BackendError
from ..offers import Offer, offers
from ..routes import Branch
from . import chunked, dense, flash, gather, naive, packed, triton
from .triton import Heads


class Backend(Protocol):
    """A module that computes branches; those of WINDOW_BACKENDS alone have no more than `window`.

    Every function takes q [B,S,Hq,Dk] whose rows are the last S of the T positions of the keys, and returns
    [B,S,Hq,Dv] in q's dtype. `gate` [B,S,Hq] multiplies the branch's output; None stands for ones.

    Attributes:
        unavailable: (device, dtype): reason why it cannot run there; None if it can.
        window: (q, k, v, gate, window, scale): branch over the last `window` positions, the query's own included.
        compressed: (q, k_cmp, v_cmp, gate, config, offset, scale): branch over k_cmp [B,N,Hkv,Dk], v_cmp [B,N,Hkv,Dv];
            row r of q is at position offset + r.
        select: (q, k_cmp, config, offset, scale): selected blocks, int32 [B,S,Hkv,slc_count], ascending, padded with
            -1. Not differentiable.
        selected: (q, k, v, gate, blocks, config, scale): branch over k [B,T,Hkv,Dk], v [B,T,Hkv,Dv] in `blocks`, as
            `select` gives them.
    """

    unavailable: Callable[[torch.device, torch.dtype], str | None]
    window: Callable[..., Tensor]  # some have options
    compressed: Callable[[Tensor, Tensor, Tensor, Tensor | None, NSAConfig, int, float], Tensor]
    select: Callable[..., Tensor]
    selected: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, NSAConfig, float], Tensor]


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {"reference": reference, "naive": naive, "chunked": chunked, "gather": gather, "packed": packed, "triton": triton}
)
WINDOW_BACKENDS: Mapping[str, Backend] = MappingProxyType({**BACKENDS, "flash": cast(Backend, flash)})


def backend_names() -> list[str]:
    """Names of the backends that compute every branch: this package's, then those of other distributions."""
    offered()
    return [*BACKENDS, *_usable]


def available_backends(device: torch.device, dtype: torch.dtype, branch: Branch | None = None) -> dict[str, str | None]:
    """Names of backends, each with None if it can run on `device` in `dtype`, else with the reason why not: of those
    that compute the branch, or every branch where that is None."""
    offered()
    reasons: dict[str, str | None] = {}
    for name, backend in {**(WINDOW_BACKENDS if branch == "win" else BACKENDS), **_usable}.items():
        try:
            reasons[name] = backend.unavailable(device, dtype)
        except Exception as err:  # of another distribution
            reasons[name] = f"asked whether it can run, it raised {type(err).__name__}: {err}"
    return reasons


_PARTS = ("unavailable", "window", "compressed", "select", "selected")
_usable: dict[str, Any] = {}  # filled by `offered`: a plain dict, which a compiler can trace


@cache
def offered() -> tuple[Offer, ...]:
    """Implementations of other distributions, by name. Loaded when first asked for, not at import."""

    def problem(_name: str, backend: Any) -> str | None:
        missing = [part for part in _PARTS if not callable(getattr(backend, part, None))]
        return f"lacks {', '.join(missing)}" if missing else None

    own = [*WINDOW_BACKENDS, "auto", "nsa", "dense", *(f"dense-{kernel}" for kernel in dense.KERNELS)]
    found = tuple(offers("nsa_bench.implementations", dict.fromkeys(own, "nsa_core uses itself"), problem))
    _usable.clear()
    _usable.update({one.name: one.entry.load() for one in found if one.problem is None})
    return found


@constant  # a compiler that traces a call runs the search instead of tracing it
def _search() -> None:
    offered()


def resolve(
    backend: str | Mapping[str, str], branches: Iterable[Branch], device: torch.device, dtype: torch.dtype,
    heads: Heads | None = None,
) -> dict[Branch, Backend]:  # fmt: skip
    """Backend of each branch, and of "select".

    Args:
        backend: one name for all, or a name per branch; "auto", and a branch not named, take `default`.
        branches: the branches to be computed, "select" among them if blocks are chosen.
        heads: as in `default`.

    Raises:
        BackendError: an unknown name, a name for a branch that is not computed, a backend that cannot run here or
            does not compute the branch.
    """
    wanted = list(branches)
    named: Mapping[str, str] = {str(name): backend for name in wanted} if isinstance(backend, str) else backend
    for branch in named.keys() - set(wanted):
        fix = f"name only branches that are computed: {', '.join(wanted)}"
        raise BackendError(f"backend[{branch!r}]", repr(named[branch]), fix)
    return {branch: _find(named.get(branch, "auto"), branch, device, dtype, heads) for branch in wanted}


def _find(name: str, branch: Branch, device: torch.device, dtype: torch.dtype, heads: Heads | None) -> Backend:
    if name == "auto":
        name = default(device, dtype, heads)
    _search()
    backends = WINDOW_BACKENDS if branch == "win" else BACKENDS
    backend = backends[name] if name in backends else _usable.get(name)
    if backend is None:
        fix = f"use one of auto, {', '.join([*backends, *_usable])}"
        if name in WINDOW_BACKENDS:
            fix = f'it computes the window alone; use backend={{"win": "{name}"}}, or {fix.removeprefix("use ")}'
        broken = [one for one in offered() if one.name == name and one.problem is not None]
        offers_it = "".join(f"{one.package} {one.version} offers it, but {one.problem}; " for one in broken)
        raise BackendError("backend", repr(name), offers_it + fix)
    reason = backend.unavailable(device, dtype)
    if reason is not None:
        usable = [other for other, why in available_backends(device, dtype, branch).items() if why is None]
        raise BackendError("backend", repr(name), f"{reason}; use one of auto, {', '.join(usable)}")
    return backend


def default(device: torch.device, dtype: torch.dtype, heads: Heads | None = None) -> str:
    """Name of the backend that "auto" takes: "triton" on a GPU whose tiles hold the heads, else "chunked", which runs
    anywhere."""
    if device.type != "cuda":
        return "chunked"
    reason = triton.unavailable(device, dtype)
    if reason is None and heads is not None:
        reason = triton.too_large(triton.capability_of(device), dtype, heads)
    return "triton" if reason is None else "chunked"
