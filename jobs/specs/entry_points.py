"""What other distributions offer in an entry point group: job kinds and peers.

nsa_core, a distribution of its own, looks for implementations by itself (nsa_core.backends.offered).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from jobs.schema.plain_text import error_in_a_line

KINDS, PEERS, IMPLEMENTATIONS = "nsa_bench.jobs", "nsa_bench.peers", "nsa_bench.implementations"


class UnusableError(Exception):
    """An offered object that cannot be used; the message says why, as the end of "the package ..."."""


@dataclass(frozen=True)
class Offer:
    """An entry point of another distribution.

    Attributes:
        package, version: of the distribution.
        entry: the entry point.
        check: gives the reason why a loaded object cannot be used; None if it can.
        taken_by: what has its name already, in words; None: nothing.
    """

    package: str
    version: str
    entry: EntryPoint
    check: Callable[[str, Any], str | None]
    taken_by: str | None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def problem(self) -> str | None:
        """Reason why it cannot be used; None if it can. Imports it."""
        try:
            self.load()
        except UnusableError as err:
            return str(err)
        return None

    def load(self) -> Any:
        """The object. Raises UnusableError."""
        if self.taken_by is not None:
            raise UnusableError(f"has a name that {self.taken_by}")
        try:
            loaded = self.entry.load()
        except (Exception, SystemExit) as err:
            raise UnusableError(f"cannot be imported ({error_in_a_line(err)})") from err
        if (problem := self.check(self.name, loaded)) is not None:
            raise UnusableError(problem)
        return loaded


def offers(group: str, own: Mapping[str, str], check: Callable[[str, Any], str | None]) -> list[Offer]:
    """Everything that is offered in a group, by name, then package; of several with one name the first has it.

    Args:
        own: names that this project uses itself, each with the words that say so after "has a name that".
    """
    found: dict[str, list[Offer]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, _distribution(entry))):
        same = found.setdefault(entry.name, [])
        taken_by = own.get(entry.name) or (f"{same[0].package} has taken" if same else None)
        same.append(Offer(*_distribution(entry), entry, check, taken_by))
    return [offer for same in found.values() for offer in same]


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    if entry.dist is None:
        return "an unknown package", "unknown"
    return entry.dist.metadata["Name"] or "an unknown package", entry.dist.metadata["Version"] or "unknown"


def sources(group: str, names: set[str | None]) -> dict[str, Path]:
    """Python files of the packages that offer these names in a group, by their paths below the package's parent."""
    files: dict[str, Path] = {}
    for entry in entry_points(group=group):
        spec = importlib.util.find_spec(entry.module.partition(".")[0]) if entry.name in names else None
        if spec is None:
            continue
        if spec.submodule_search_locations is None:  # a single module
            files |= {Path(spec.origin).name: Path(spec.origin)} if spec.has_location and spec.origin else {}
        for folder in map(Path, spec.submodule_search_locations or ()):
            files |= {path.relative_to(folder.parent).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    return files
