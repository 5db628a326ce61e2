"""The command that submits what a stored run ran: a ready spec with the settings in which the run differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml


def changes(ready: Mapping[str, Any], ran: Mapping[str, Any]) -> list[str]:
    """Settings of `ran` that differ from those of `ready`, as "key=value", nested ones as "section.key=value".

    A key that one of the two lacks is passed over: specs leave out newer settings that add nothing.
    """
    found = []
    for name, value in ready.items():
        if name not in ran or ran[name] == value:
            continue
        if isinstance(value, Mapping) and isinstance(ran[name], Mapping):
            found += [f"{name}.{each}" for each in changes(value, ran[name])]
        else:
            found.append(f"{name}={_flow(ran[name])}")
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
