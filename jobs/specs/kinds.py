"""Job kinds: modules of this package, and modules that installed distributions offer as entry points.

A kind's module defines `Spec` (a JobSpec whose `kind` is the kind's name), `Case` (what determines a measurement),
`measure(case, beat)`, `QUANTITIES` (everything it may measure) and, if it has axes of its own, `AXES`; `IMPORTS` names
modules that a point's process is to import before it says what it found there, and that drivers do without. Only the
requested kind is imported, so that a broken kind does not affect the others.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

import jobs
from jobs.schema.axes import MODEL, Axis, check_axes
from jobs.schema.plain_text import shown
from jobs.schema.point import Case
from jobs.schema.quantities import check_quantities
from jobs.specs.spec import JobSpec, SpecError

if TYPE_CHECKING:
    from nsa_core.offers import Offer


# This package's modules, each of which may be a kind.
_OWN = [info.name for info in pkgutil.iter_modules(jobs.__path__) if not info.ispkg and not info.name.startswith("_")]


def kinds() -> dict[str, ModuleType]:
    """Modules of all usable job kinds, by name."""
    modules = {name: importlib.import_module(f"jobs.{name}") for name in _OWN}
    own = {name: module for name, module in modules.items() if hasattr(module, "Spec")}
    return {offer.name: offer.entry.load() for offer in offered_kinds() if offer.problem is None} | own


def kind_module(name: str) -> ModuleType:
    """Module of a kind. Raises SpecError: it is unknown, or comes from another distribution and cannot be used."""
    if name in _OWN:
        if hasattr(module := importlib.import_module(f"jobs.{name}"), "Spec"):
            return module
    elif offer := next((offer for offer in offered_kinds() if offer.name == name), None):
        if (problem := offer.problem) is not None:
            by = f"{offer.package} {offer.version}"
            raise SpecError(f"kind: {name!r}, offered by {by}, {problem}; mend or uninstall {offer.package}")
        return offer.entry.load()
    # Backends are no kind, but may be taken for one.
    fix = "kind: branches with 'backends: [...]'" if name == "backends" else f"one of {', '.join(sorted(kinds()))}"
    raise SpecError(f"kind: {shown(name)} is no job kind; use {fix}")


def axes_of(kind: ModuleType) -> tuple[Axis, ...]:
    """Axes of a kind's points beside those of all kinds: the sizes of a model that is no preset, and its own."""
    own = {axis.name: axis for axis in getattr(kind, "AXES", ())}
    return tuple(({MODEL.name: MODEL} | own).values())


def offered_kinds() -> list[Offer]:
    """Kinds of other distributions, by name."""
    from nsa_core.offers import offers  # with PyTorch: most of a driver's start, which reads one kind

    def problem(name: str, module: Any) -> str | None:
        if missing := [part for part in ("Spec", "Case", "measure", "QUANTITIES") if not hasattr(module, part)]:
            return f"lacks {' and '.join(missing)}"
        for part, base in (("Spec", JobSpec), ("Case", Case)):
            own = getattr(module, part)
            if not (isinstance(own, type) and issubclass(own, base)):
                return f"has a {part} that is not a {base.__module__}.{base.__name__}"
        if get_args(module.Spec.model_fields["kind"].annotation) != (name,):
            return f"has a Spec whose kind is not Literal[{name!r}]"
        try:
            check_quantities(module.QUANTITIES)
            check_axes(getattr(module, "AXES", ()))
        except (TypeError, ValueError) as err:
            return f"cannot be used: {err}"
        return None

    return offers("nsa_bench.jobs", dict.fromkeys(_OWN, "a module of nsa-bench's own jobs has"), problem)


def offered_sources(spec: JobSpec) -> dict[str, Path]:
    """Python files of the other distributions that offer a job's kind, implementations or peers, by relative path."""
    kinds = set() if spec.kind in _OWN else {spec.kind}
    names = {*getattr(spec, "implementations", ()), *getattr(spec, "backends", ()), getattr(spec, "backend", None)}
    wanted = {"jobs": kinds, "implementations": names, "peers": {*getattr(spec, "peers", ())}}
    files: dict[str, Path] = {}
    entries = [(entry, own) for group, own in wanted.items() for entry in entry_points(group=f"nsa_bench.{group}")]
    for entry in (entry for entry, own in entries if entry.name in own):
        if (found := importlib.util.find_spec(entry.module.partition(".")[0])) is None:
            continue
        if found.submodule_search_locations is None and found.origin:  # a single module
            files[Path(found.origin).name] = Path(found.origin)
        for folder in map(Path, found.submodule_search_locations or ()):
            files |= {path.relative_to(folder.parent).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    return files
