"""Checks whether a point can run on a machine: its implementations, its memory, its CPU threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from jobs.schema.point import TRITON_PROBLEM, Machine
from jobs.schema.quantities import readable_bytes
from jobs.specs.fields import DENSE_KERNELS, WINDOW_ALONE
from jobs.specs.spec import JobSpec, SpecError
from nsa_core import available_backends
from nsa_core.backends.dense import Host, unusable
from nsa_core.backends.flash import lacking
from nsa_core.backends.triton import Heads, too_large, unsupported, untested
from nsa_core.model import ModelConfig


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
