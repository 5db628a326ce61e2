"""Checks of a spec: what can run on a machine, what fits into its memory, and which sizes of NSA change something."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType

import torch

from jobs.schema.point import TRITON_PROBLEM, Machine
from jobs.schema.quantities import readable_bytes
from jobs.specs.fields import DENSE_KERNELS, WINDOW_ALONE, computes
from jobs.specs.spec import JobSpec, SpecError
from nsa_core import NSAConfig, available_backends
from nsa_core.backends import BACKENDS
from nsa_core.backends.dense import Host, unusable
from nsa_core.backends.flash import lacking
from nsa_core.backends.triton import Heads, too_large, unsupported, untested
from nsa_core.errors import InputError
from nsa_core.functional import BRANCHES
from nsa_core.model import ModelConfig

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


def backend_reasons(machine: Machine, dtype: torch.dtype, heads: Heads) -> dict[str, str | None]:
    """For each backend name, the reason why it cannot compute such operands on `machine`; None if it can.

    A GPU host's fingerprint tells which Triton it has; without one it counts as installed.
    """
    reasons = available_backends(torch.device(machine.device), dtype)
    if machine.device == "cuda":
        host, problem, found = _host(machine), None, machine.fingerprint
        if found and "triton" not in found:
            problem = f'{machine.name} has no Triton: pip install "nsa-bench[gpu]" there'
        elif found and (reason := found.get(TRITON_PROBLEM) or untested(found["triton"])):
            problem = f"{machine.name}: {reason}"
        capability = host.capability if host else None
        reasons["triton"] = problem or unsupported(capability) or too_large(capability, dtype, heads)
    return reasons


def _host(machine: Machine) -> Host | None:
    """Capability and packages of the machine; None for a GPU host without a fingerprint."""
    if machine.device != "cuda":
        return Host(None, {})
    if (capability := machine.fingerprint.get("capability", "unknown")) == "unknown":
        return None
    major, minor = map(int, capability.split("."))
    return Host((major, minor), lacking(machine.fingerprint))


def dense_reasons(machine: Machine, dtype: str, dim: int) -> dict[str, str | None]:
    """For each dense implementation, the reason why it cannot run on `machine` at head dim `dim`; None if it can."""
    host = _host(machine)
    return {
        name: None if host is None or kernel == "auto" else unusable(kernel, host, getattr(torch, dtype), dim)
        for name, kernel in DENSE_KERNELS.items()
    }


def refuse_unusable(
    names: Sequence[str],
    machine: Machine,
    dtype: str,
    model: ModelConfig,
    others: Iterable[str],
    field: str = "implementations",
) -> None:
    """Raise SpecError for the first name of a spec's field with a reason why it cannot run on `machine`. `others` are
    the field's further values, which are no backends of all branches: of WINDOW_ALONE or DENSE_KERNELS."""
    torch_dtype = getattr(torch, dtype)
    window = available_backends(torch.device(machine.device), torch_dtype, "win")
    special = dense_reasons(machine, dtype, model.head_dim) | {name: window[name] for name in WINDOW_ALONE}
    reasons = backend_reasons(machine, torch_dtype, Heads(model.head_dim, model.heads // model.kv_heads))
    reasons |= {name: special[name] for name in others}
    for name in names:
        if (reason := reasons[name]) is not None:
            usable = [other for other, against in reasons.items() if against is None]
            raise SpecError(f"{field}: {name!r}: {reason}; use {', '.join(usable)}")


def does_not_fit(needed: int | None, spec: JobSpec, machine: Machine, advice: str) -> str | None:
    """Reason to skip a point that needs `needed` bytes; None if it fits or `needed` is unknown (None)."""
    limit, who = machine.memory_bytes, f"the {machine.device} device has"
    if spec.memory_gib is not None and spec.memory_gib * 2**30 < limit:
        limit, who = int(spec.memory_gib * 2**30), "memory_gib allows"
    if needed is None or needed <= limit:
        return None
    return f"needs {readable_bytes(needed)}, {who} {readable_bytes(limit)}; {advice}"


def refuse_idle(
    spec: JobSpec,
    nsa: NSAConfig | None,
    implementations: Iterable[str],
    dtype: str | None,
    branches: Iterable[str] = (ALL,),
    section: str | None = None,
) -> None:
    """Refuse a field of a spec's section `nsa` that would change none of its points. Raises ValueError.

    One that has its default's value is as if it were left out.

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
