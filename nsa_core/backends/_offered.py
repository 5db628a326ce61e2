"""Implementations that installed distributions offer as entry points: backends beside this package's own.

Group `nsa_bench.implementations`: name = implementation, value = an object of the protocol `Backend`. They are loaded
when first asked for, not at import; a broken one stops no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from .._tracing import constant

GROUP = "nsa_bench.implementations"
_usable: dict[str, Any] = {}  # filled by `offered`: a plain dict, which a compiler can trace
_PARTS = ("unavailable", "window", "compressed", "select", "selected")


@dataclass(frozen=True)
class OfferedBackend:
    """An implementation offered by another distribution.

    Attributes:
        name: the implementation.
        package, version: of the distribution.
        backend: the object, of the protocol `Backend`; None if it cannot be used.
        problem: why it cannot be used; None if it can.
    """

    name: str
    package: str
    version: str
    backend: Any
    problem: str | None

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run there; None if it can. An exception is a reason."""
        try:
            return self.backend.unavailable(device, dtype)
        except Exception as err:
            return f"asked whether it can run, {self.package} {self.version} raised {type(err).__name__}: {err}"


@cache
def offered() -> tuple[OfferedBackend, ...]:
    """All that are installed, by name, with their problems. Read once a process."""
    found: list[OfferedBackend] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, *_distribution(entry))):
        package, version = _distribution(entry)
        taken = next((other.package for other in found if other.name == entry.name), None)
        backend, problem = (None, f"has a name that {taken} has taken") if taken else _load(entry)
        found.append(OfferedBackend(entry.name, package, version, backend, problem))
    _usable.clear()
    _usable.update({one.name: one.backend for one in found if one.problem is None})
    return tuple(found)


def offered_backend(name: str) -> Any:
    """The usable backend of that name; None if there is none."""
    _search()
    return _usable.get(name)


@constant  # a compiler that traces a call runs the search instead of tracing it
def _search() -> None:
    offered()


def _load(entry: EntryPoint) -> tuple[Any, str | None]:
    """The backend and no problem, or no backend and why."""
    if _is_own(entry.name):
        return None, "has a name that nsa_core uses itself"
    try:
        backend = entry.load()
    except (Exception, SystemExit) as err:
        return None, f"cannot be imported ({type(err).__name__}: {err})"
    missing = [part for part in _PARTS if not callable(getattr(backend, part, None))]
    return (None, f"lacks {', '.join(missing)}") if missing else (backend, None)


def _is_own(name: str) -> bool:
    from . import WINDOW_BACKENDS  # which imports this module

    return name in WINDOW_BACKENDS or name in ("auto", "dense") or name.startswith("dense-")


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    """Name and version."""
    if entry.dist is None:
        return "an unknown package", "unknown"
    return entry.dist.metadata["Name"] or "an unknown package", entry.dist.metadata["Version"] or "unknown"
