"""Offers of installed distributions by entry point group: implementations; to packages above, kinds and peers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any


@dataclass(frozen=True)
class Offer:
    """An entry point of another distribution. It is imported when it is looked at: a broken one stops no other."""

    name: str
    package: str  # the distribution, and its version
    version: str
    entry: EntryPoint  # loads the object
    check: Callable[[str, Any], str | None]  # gives the reason why a loaded object cannot be used; None if it can
    taken_by: str | None  # what has its name already, in words; None: nothing

    @property
    def problem(self) -> str | None:
        """Reason why it cannot be used, as the end of "the package ..."; None if it can. Imports it."""
        if self.taken_by is not None:
            return f"has a name that {self.taken_by}"
        try:
            loaded = self.entry.load()
        except (Exception, SystemExit) as err:
            text = " ".join(str(err).split())[:200]
            return f"cannot be imported ({type(err).__name__}: {text})"
        return self.check(self.name, loaded)


def offers(group: str, own: Mapping[str, str], check: Callable[[str, Any], str | None]) -> list[Offer]:
    """Everything that is offered in a group, by name, then package; of several with one name the first has it.
    `own` are names that this project uses itself, each with the words that say so after "has a name that".
    """
    found = []
    for entry in entry_points(group=group):
        assert entry.dist is not None, "found by its distribution"
        package, version = (entry.dist.metadata[key] or "unknown" for key in ("Name", "Version"))
        found.append((entry.name, package, version, entry))
    first: dict[str, str] = {}
    offered = []
    for name, package, version, entry in sorted(found, key=lambda each: each[:3]):
        taken_by = own.get(name) or (f"{first[name]} has taken" if name in first else None)
        first.setdefault(name, package)
        offered.append(Offer(name, package, version, entry, check, taken_by))
    return offered
