"""Every field of every kind as tables, of the kinds' own JSON schemas: `python -m jobs.specs.reference docs/specs.md`.

It writes the part of the page from MARK on.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs.specs.kinds import kinds
from jobs.specs.spec import JobSpec

MARK = "<!-- From here on made by `make specs`: edit the fields' descriptions in jobs/ instead. -->"

_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
_TITLE = re.compile("(Spec|Config)$")  # left out of a section's
_HEADS = "| field | value | default | meaning |\n| --- | --- | --- | --- |"
_ATTRIBUTE = re.compile(r"^ +(\w+): (.+(?:\n {8,}.+)*)$", re.MULTILINE)


def page() -> str:
    """Markdown: the common fields, a table a kind, and one of each section."""
    own = {name: module.Spec for name, module in sorted(kinds().items()) if module.__name__ == f"jobs.{name}"}
    schemas = {name: spec.model_json_schema() for name, spec in own.items()}
    sections = {
        _TITLE.sub("", name): section
        for schema in schemas.values()
        for name, section in schema.get("$defs", {}).items()
    }
    common = set(JobSpec.model_fields) - {"kind"}
    lines = [
        "## Fields of every kind\n",
        "A spec begins with `kind`.\n",
        *_table(schemas["train"], common, sections),
        "",
    ]
    for name, schema in schemas.items():
        lines += [f"## kind: {name}\n", f"{_about(schema)}\n"]
        lines += [*_table(schema, set(schema["properties"]) - common - {"kind"}, sections), ""]
    for name, schema in sorted(sections.items()):
        lines += [f"## Section {name}\n", f"{_about(schema)}\n"]
        lines += [*_table(schema, set(schema["properties"]), sections), ""]
    return "\n".join(lines)


def _about(schema: Mapping[str, Any]) -> str:
    return schema.get("description", "").partition("\n")[0]


def _table(schema: Mapping[str, Any], names: set[str], sections: Mapping[str, Any]) -> Iterator[str]:
    yield _HEADS
    attributes = {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(schema.get("description", ""))}
    for name, field in schema["properties"].items():
        if name in names:
            meaning = field.get("description") or attributes.get(name)
            if meaning is None:  # a section's own words
                meaning = next(
                    (_about(sections[_TITLE.sub("", ref)]) for ref in re.findall(r"\$defs/(\w+)", json.dumps(field))),
                    "",
                )
            meaning = re.sub(r"\bNone: ", "none: ", meaning)
            cells = name, _value(field), _default(field), meaning
            yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _value(field: Mapping[str, Any]) -> str:
    """What a field takes, in words; null is its default's business."""
    if "$ref" in field:
        name = _TITLE.sub("", field["$ref"].rpartition("/")[2])
        return f"section [{name}](#section-{name.lower()})"
    if values := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{value}`" for value in values if value is not None)
    if parts := [part for part in field.get("anyOf", ()) if part.get("type") != "null"]:
        return " or ".join(dict.fromkeys(map(_value, parts)))
    if field.get("type") == "array":
        return f"list: {_value(field['items'])}"
    return _TYPES.get(field.get("type", ""), "`name: value` lines")


def _default(field: Mapping[str, Any]) -> str:
    if "default" not in field:
        return "required"
    default = field["default"]
    if default is None:
        return "none"
    return "its defaults" if isinstance(default, dict) else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(f"{path.read_text().partition(MARK)[0]}{MARK}\n\n{page()}")
