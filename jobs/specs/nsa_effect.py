"""Which fields of NSAConfig act on which branch and implementation, so that kinds can refuse those that change nothing.

A field that has its default's value is never refused: it is as if it were left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType

from jobs.specs.fields import DENSE_KERNELS, computes
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
        "slots": ("slc",),  # of kernels that pack them alone
    }
)
"""Branches that each field changes, under every implementation of NSA; none of them changes dense attention."""

ALL = "all"
_USUAL = NSAConfig()
_UNPACKED = frozenset(BACKENDS) - {"triton"}  # of ours only Triton's kernels pack slots; those of others may


def refuse_idle(
    spec: JobSpec,
    nsa: NSAConfig | None,
    implementations: Iterable[str],
    dtype: str | None,
    branches: Iterable[str] = (ALL,),
    section: str | None = None,
) -> None:
    """Refuse a field of a spec's section `nsa` that would change none of its points. Raises ValueError.

    Args:
        implementations: all that are measured; dense ones by a name of DENSE_KERNELS.
        dtype: of the points; None if nothing of them has slots, as in decoding.
        branches: measured each by itself; "all": the whole operator.
        section: that gives `nsa`; None: the spec's or its model's.
    """
    if nsa is None:
        return
    sparse = {each for each in product({*implementations} - {*DENSE_KERNELS}, branches) if computes(*each)}
    measured = {branch for _, branch in sparse}
    if ALL in measured:
        measured = {*BRANCHES}
    packing = spec.device != "cpu" and dtype == "bfloat16"
    packing = packing and any(name not in _UNPACKED and branch in (ALL, "slc") for name, branch in sparse)
    acting = {name for name in ACTS_ON if measured & {*ACTS_ON[name]} and (name != "slots" or packing)}
    idle = [name for name in ACTS_ON if name not in acting and getattr(nsa, name) != getattr(_USUAL, name)]
    if not sparse:
        reason, otherwise = "changes nothing of dense attention", "add an implementation of NSA"
    else:
        try:
            replace(nsa, **{name: getattr(_USUAL, name) for name in idle})
        except InputError:  # the sizes of others need some of them
            return
        if not idle:
            return
        needed, otherwise = ACTS_ON[idle[0]], ""
        if not measured & {*needed}:
            reason = f"changes nothing of branch {' or '.join(name for name in BRANCHES if name in measured)}"
            otherwise = f"measure {', '.join(needed)} or all, too"
        elif dtype is None:
            reason = "a decoding step has none"
        else:
            reason = "only Triton's kernels pack them, on a GPU in bfloat16"
    section = section or ("nsa" if getattr(spec, "nsa", None) is nsa else "model.nsa")
    field = f"{section}.{idle[0]}: {getattr(nsa, idle[0])!r}" if idle else f"{section}: the defaults"
    others = f", {', '.join(idle[1:])} as well" if idle[1:] else ""
    raise ValueError(f"{field}: {reason}; leave it out{others}{otherwise and f', or {otherwise}'}")
