"""Which fields of NSAConfig act on which branch and implementation, so that kinds can refuse those that change nothing.

A field that has its default's value is never refused: it is as if it were left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from jobs.specs.fields import DENSE, computes
from jobs.specs.spec import JobSpec
from nsa_core import NSAConfig
from nsa_core.backends import BACKENDS
from nsa_core.errors import InputError
from nsa_core.functional import BRANCHES

# The selected branch chooses its blocks by the scores of compressed tokens.
ACTS_ON: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cmp_block": ("cmp", "slc"),
        "cmp_stride": ("cmp", "slc"),
        "slc_block": ("slc",),
        "slc_count": ("slc",),
        "init_blocks": ("slc",),
        "local_blocks": ("slc",),
        "window": ("win",),
        "compress": ("cmp", "slc"),
        "slots": ("slc",),  # of `packs` alone
    }
)
"""Branches that each field changes, under every implementation of NSA; none of them changes dense attention."""

ALL = "all"
_USUAL = NSAConfig()
_UNPACKED = frozenset(BACKENDS) - {"triton"}


def packs(implementation: str, device: str, dtype: str | None) -> bool:
    """Whether an implementation may pack slots: Triton's kernels do, in bf16, and those of others may."""
    return implementation not in _UNPACKED and device != "cpu" and dtype == "bfloat16"


def refuse_idle(
    spec: JobSpec,
    nsa: NSAConfig | None,
    implementations: Iterable[str],
    dtype: str | None,
    branches: Iterable[str] = (ALL,),
) -> None:
    """Refuse a field of a spec's section `nsa` that would change none of its points.

    Args:
        implementations: all that are measured; dense ones by a name of DENSE.
        dtype: of the points; None if nothing of them has slots, as in decoding.
        branches: measured each by itself; "all": the whole operator.

    Raises:
        ValueError: there is such a field; the message names it, its value and the fix.
    """
    if nsa is None:
        return
    chosen = [*branches]
    sparse = {(x, y) for x in implementations if x not in DENSE for y in chosen if computes(x, y)}
    measured = {branch for _, branch in sparse}
    if ALL in measured:
        measured = {*BRANCHES}
    if not sparse:
        idle, reason = [name for name in ACTS_ON if _is_set(nsa, name)], "changes nothing of dense attention"
        raise ValueError(_message(nsa, idle, reason, "add an implementation of NSA"))
    packing = any(packs(name, spec.device, dtype) for name, branch in sparse if branch in (ALL, "slc"))
    acting = {name for name in ACTS_ON if measured & {*ACTS_ON[name]} and (name != "slots" or packing)}
    idle = [name for name in ACTS_ON if name not in acting and _is_set(nsa, name)]
    if not _without(nsa, idle):  # the sizes of others need some of them
        idle = [name for name in idle if _without(nsa, [name])]
    if not idle:
        return
    needed = ACTS_ON[idle[0]]
    if measured & {*needed}:
        packed = (
            "a decoding step has none" if dtype is None else "only Triton's kernels pack them, on a GPU in bfloat16"
        )
        raise ValueError(_message(nsa, idle, packed))
    reason = f"changes nothing of branch {' or '.join(name for name in BRANCHES if name in measured)}"
    raise ValueError(_message(nsa, idle, reason, f"measure {', '.join(needed)} or all, too"))


def _is_set(nsa: NSAConfig, name: str) -> bool:
    return getattr(nsa, name) != getattr(_USUAL, name)


def _without(nsa: NSAConfig, names: list[str]) -> bool:
    """Whether the configuration is valid without these fields."""
    try:
        replace(nsa, **{name: getattr(_USUAL, name) for name in names})
    except InputError:
        return False
    return True


def _message(nsa: NSAConfig, idle: list[str], reason: str, otherwise: str | None = None) -> str:
    """Field, value and fix; of several fields the first one's value."""
    field = f"nsa.{idle[0]}: {getattr(nsa, idle[0])!r}" if idle else "nsa: the defaults"
    others = f", {', '.join(idle[1:])} as well" if idle[1:] else ""
    return f"{field}: {reason}; leave it out{others}{f', or {otherwise}' if otherwise else ''}"
