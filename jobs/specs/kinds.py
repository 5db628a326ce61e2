"""Job kinds: modules of this package, and modules that installed distributions offer as entry points.

A kind's module defines `Spec` (a JobSpec whose `kind` is the kind's name), `measure`, `QUANTITIES` (everything it may
measure) and, if it has axes of its own, `AXES`; `IMPORTS` names modules that a point's process is to import before it
says what it found there, and that drivers do without. A distribution offers one in the group `nsa_bench.jobs`: name =
kind, value = module. Only the requested kind is imported, so that a broken kind does not affect the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import get_args

import jobs
from jobs.schema.axes import Axis, check_axes
from jobs.schema.plain_text import shown
from jobs.schema.quantities import check_quantities

GROUP = "nsa_bench.jobs"

_INSTEAD = {"backends": "kind: branches with 'backends: [...]'"}  # of names that are no kind, but may be taken for one


class KindError(LookupError):
    """Unknown or unusable kind; the message gives the reason."""


@dataclass(frozen=True)
class OfferedKind:
    """A kind offered by another distribution.

    Attributes:
        name: the kind.
        package, version: name and version of the distribution.
        problem: reason why it cannot be used; None if it can.
    """

    name: str
    package: str
    version: str
    problem: str | None


def kinds() -> dict[str, ModuleType]:
    """Modules of all usable job kinds, by name."""
    found = {name: module for name in _own_modules() if (module := _own_kind(name)) is not None}
    for entry in _entries():
        if entry.name not in found and _problem(entry) is None:
            found[entry.name] = entry.load()
    return found


def kind_module(name: str) -> ModuleType:
    """Module of a kind.

    Raises:
        KindError: the kind is unknown, or comes from another distribution and cannot be used.
    """
    if name in _own_modules():
        if (module := _own_kind(name)) is not None:
            return module
    elif (entry := next((entry for entry in _entries() if entry.name == name), None)) is not None:
        if (problem := _problem(entry)) is None:
            return entry.load()
        package, version = distribution(entry)
        raise KindError(f"{name!r}, offered by {package} {version}, {problem}; mend or uninstall {package}")
    fix = _INSTEAD.get(name, f"one of {', '.join(sorted(kinds()))}")
    raise KindError(f"{shown(name)} is no job kind; use {fix}")


def own_axes(module: ModuleType) -> tuple[Axis, ...]:
    """Axes that a kind declares besides the common ones."""
    return tuple(getattr(module, "AXES", ()))


def offered_kinds() -> list[OfferedKind]:
    """Kinds of other distributions, by name, each with its problem if it has one."""
    return [OfferedKind(entry.name, *distribution(entry), _problem(entry)) for entry in _entries()]


def source_files(module: str) -> dict[str, Path]:
    """Python files of the top-level package (or module) that holds `module`, by their path below its parent.

    Empty if it is not installed, or not installed as files.
    """
    found = importlib.util.find_spec(module.partition(".")[0])
    if found is None:
        return {}
    if found.submodule_search_locations is None:
        return {Path(found.origin).name: Path(found.origin)} if found.has_location and found.origin else {}
    folders = [Path(folder) for folder in found.submodule_search_locations]
    return {
        path.relative_to(folder.parent).as_posix(): path for folder in folders for path in sorted(folder.rglob("*.py"))
    }


def kind_sources(name: str) -> dict[str, Path]:
    """Python files of a kind that another distribution offers, as `source_files`; empty for a kind of this package."""
    if name in _own_modules():
        return {}
    return next((source_files(entry.module) for entry in _entries() if entry.name == name), {})


def _own_modules() -> list[str]:
    """Names of this package's public modules; each may be a kind."""
    found = pkgutil.iter_modules(jobs.__path__)
    return [info.name for info in found if not info.ispkg and not info.name.startswith("_")]


def _own_kind(name: str) -> ModuleType | None:
    module = importlib.import_module(f"jobs.{name}")
    return None if _missing(module) else module


def _entries() -> list[EntryPoint]:
    """Entry points by name, then package; the first of several with one name is used."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, distribution(entry)))


def distribution(entry: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution."""
    if entry.dist is None:
        return "an unknown package", "unknown"
    return entry.dist.metadata["Name"] or "an unknown package", entry.dist.metadata["Version"] or "unknown"


def _problem(entry: EntryPoint) -> str | None:
    """Reason why the kind cannot be used; None if it can."""
    if entry.name in _own_modules():
        return "has a name that a module of nsa-bench's own jobs has"
    first = next(other for other in _entries() if other.name == entry.name)
    if distribution(first) != distribution(entry):
        return f"has a name that {distribution(first)[0]} has taken"
    try:
        module = entry.load()
    except (Exception, SystemExit) as err:
        return f"cannot be imported ({type(err).__name__}: {err})"
    if missing := _missing(module):
        return f"lacks {' and '.join(missing)}"
    try:
        check_quantities(module.QUANTITIES)
        check_axes(own_axes(module))
    except (TypeError, ValueError) as err:
        return f"cannot be used: {err}"
    return _misnamed(module, entry.name)


def _missing(module: ModuleType) -> list[str]:
    return [name for name in ("Spec", "measure", "QUANTITIES") if not hasattr(module, name)]


def _misnamed(module: ModuleType, name: str) -> str | None:
    from jobs.specs.spec import JobSpec  # jobs.specs.spec imports this module

    if not (isinstance(module.Spec, type) and issubclass(module.Spec, JobSpec)):
        return "has a Spec that is not a jobs.specs.spec.JobSpec"
    literal = get_args(module.Spec.model_fields["kind"].annotation)
    return None if literal == (name,) else f"has a Spec whose kind is not Literal[{name!r}]"
