"""The command that submits what a stored run ran: a ready spec with the settings in which the run differs from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from jobs.specs.spec import JobSpec, SpecError


def whole(stored: Mapping[str, Any], kind: type[JobSpec]) -> dict[str, Any]:
    """A stored spec with the settings that it leaves out, which had their defaults."""
    optional = {name: field for name, field in kind.model_fields.items() if not field.is_required()}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in optional.items()}
    return to_jsonable_python(defaults) | dict(stored)


def needed(load: Callable[[list[str]], Mapping[str, Any]], ran: Mapping[str, Any]) -> list[str]:
    """Settings with which a ready spec is `ran`, without those that follow from the others.

    Args:
        load: gives the ready spec with some settings; raises SpecError if they do not go together.
        ran: as `load` gives specs.
    """

    def suffice(settings: list[str]) -> bool:
        try:
            return not changes(load(settings), ran)
        except SpecError:
            return False

    settings = changes(load([]), ran)
    for each in reversed(settings):
        others = [other for other in settings if other != each]
        if suffice(others):
            settings = others
    return settings


def changes(ready: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    """Settings of `ran` that differ from those of `ready`, as "key=value", nested ones as "section.key=value".

    A key that `ran` lacks is passed over.
    """
    found = []
    for name, value in ran.items():
        usual = ready.get(name)
        if name in ready and usual == value:
            continue
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            found += [f"{name}.{each}" for each in changes(usual, value)]
        else:
            found.append(f"{name}={_flow(value)}")
    return found


def setting(spec: Mapping[str, Any], name: str) -> Any:
    """A setting of a spec by its name, "resources.num_gpus"; None if the spec leaves it out."""
    node: Any = spec
    for part in name.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(_whole(value), default_flow_style=True, sort_keys=False, width=2**20)
    return text.removesuffix("...\n").strip()


def _whole(value: Any) -> Any:
    """The value with whole numbers in place of floats that are whole."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {name: _whole(each) for name, each in value.items()} if isinstance(value, dict) else value
