"""Spec fields that several kinds share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field

from jobs.measure.check import DENSE_KERNELS
from jobs.point import Machine
from jobs.spec import JobSpec, SpecError
from nsa_core import NSAConfig, available_backends
from nsa_core.backends import BACKENDS
from nsa_core.backends.dense import Host, unusable
from nsa_core.backends.triton import too_wide
from nsa_core.model import PRESETS

DType = Literal["float32", "bfloat16", "float16"]


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _nsa(value: Any) -> Any:
    """NSAConfig of a mapping; its own checks name field, value and fix."""
    if not isinstance(value, Mapping):
        return value
    known = [field.name for field in fields(NSAConfig)]
    for key in value:
        if key not in known:
            raise ValueError(f"{key}: unknown key (value {value[key]!r}); use {', '.join(known)}")
    return NSAConfig(**value)


def _preset(value: str) -> str:
    if value not in PRESETS:
        raise ValueError(f"there is no such preset; use one of {', '.join(PRESETS)}")
    return value


def _unique(values: Sequence[Any]) -> Sequence[Any]:
    repeated = dict.fromkeys(v for v in values if values.count(v) > 1)
    if repeated:
        raise ValueError(f"{', '.join(map(str, repeated))} appears more than once; name each once")
    return values


NSA = Annotated[NSAConfig, BeforeValidator(_nsa)]
Preset = Annotated[str, AfterValidator(_preset)]
Unique = AfterValidator(_unique)  # of a list: no value twice


def implementation_names(*dense: str) -> AfterValidator:
    """Of a list: each is a backend of the sparse operator, or one of these kinds of dense attention."""

    def check(names: list[str]) -> list[str]:
        known = (*BACKENDS, *dense)
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is no implementation; use {', '.join(known)}")
        return names

    return AfterValidator(check)


# Bounds far beyond what any machine computes, so that a slip of the finger is a message and not a long wait.
MOST = 2**20
Count = Annotated[int, Field(ge=1, le=MOST)]
Layers = Annotated[int, Field(ge=1, le=2**12)]
Length = Annotated[int, Field(ge=1, le=2**27)]  # tokens of a sequence
Large = Annotated[int, Field(ge=1, le=2**40)]  # of steps, or of tokens in all


def backend_reasons(machine: Machine, dtype: torch.dtype, dim: int) -> dict[str, str | None]:
    """Every backend's name, with None if it can compute such operands on `machine`, else why not.

    The machine may be another than this one.

    A GPU host's Triton is what its fingerprint says. Where nobody has asked it, the point itself will tell.
    """
    reasons = available_backends(torch.device(machine.device), dtype)
    if machine.device == "cuda":
        missing = machine.fingerprint and "triton" not in machine.fingerprint
        absent = f'{machine.name} has no Triton: pip install "nsa-bench[gpu]" there' if missing else None
        host = _host(machine)
        reasons["triton"] = absent or too_wide(host.capability if host else None, dtype, dim)
    return reasons


def _host(machine: Machine) -> Host | None:
    """What decides there which kernels can run; None of a GPU host that nobody has asked."""
    if machine.device != "cuda":
        return Host(None, {})
    capability = machine.fingerprint.get("capability", "unknown")
    return None if capability == "unknown" else Host.described(capability, machine.fingerprint)


def dense_reasons(machine: Machine, dtype: torch.dtype, dim: int) -> dict[str, str | None]:
    """The same for the implementations of dense attention, at a head dim.

    What a GPU host has is what its fingerprint says. Where nobody has asked it, the point itself will tell.
    """
    host = _host(machine)
    if host is None:
        return dict.fromkeys(DENSE_KERNELS)
    kernels = {name: kernel for name, kernel in DENSE_KERNELS.items() if kernel != "auto"}
    return dict.fromkeys(DENSE_KERNELS) | {name: unusable(kernel, host, dtype, dim) for name, kernel in kernels.items()}


def refuse_unusable(implementations: Sequence[str], reasons: Mapping[str, str | None]) -> None:
    """Raise SpecError for the first of them that has a reason why it cannot run."""
    for name in implementations:
        if (reason := reasons[name]) is not None:
            usable = [other for other, against in reasons.items() if against is None]
            raise SpecError(f"implementations: {name!r}: {reason}; use {', '.join(usable)}")


def threads(spec: JobSpec, machine: Machine) -> int | None:
    """CPU threads that a point computes with: the cores it is scheduled with; None on a GPU: PyTorch's own choice."""
    return max(1, int(spec.resources.num_cpus)) if machine.device == "cpu" else None


def does_not_fit(needed: int | None, spec: JobSpec, machine: Machine, advice: str) -> str | None:
    """Why a point that needs so many bytes is not worth starting; None if it fits, or nothing predicts its needs."""
    limit, who = machine.memory_bytes, f"the {machine.device} device has"
    if spec.memory_gib is not None and spec.memory_gib * 2**30 < limit:
        limit, who = int(spec.memory_gib * 2**30), "memory_gib allows"
    if needed is None or needed <= limit:
        return None
    return f"needs {needed / 2**30:.1f} GiB, {who} {limit / 2**30:.1f} GiB; {advice}"
