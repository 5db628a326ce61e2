"""Every field of every kind as tables, of the kinds' own JSON schemas: `python -m jobs.specs.reference docs/specs.md`.

It writes the part of the page from MARK on.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jobs.specs.kinds import kinds
from jobs.specs.spec import JobSpec

MARK = "<!-- From here on made by `make specs`: edit the fields' descriptions in jobs/ instead. -->"

_TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
_NAMED = re.compile(r"\$defs/(\w+?)(?:Spec|Config)?\"")  # a section, in a field's schema
_ATTRIBUTE = re.compile(r"^ +(\w+): (.+(?:\n {8,}.+)*)$", re.MULTILINE)  # of a dataclass, in its docstring


def page() -> str:
    """Markdown: the common fields, a table a kind, and one of each section."""
    schemas = {
        f"kind: {name}": module.Spec.model_json_schema()
        for name, module in sorted(kinds().items())
        if module.__name__ == f"jobs.{name}"
    }
    defined = {name: section for schema in schemas.values() for name, section in schema.get("$defs", {}).items()}
    sections = {re.sub("(Spec|Config)$", "", name): section for name, section in sorted(defined.items())}
    common = {**JobSpec.model_json_schema(), "description": "A spec begins with `kind`."}
    tables = {"Fields of every kind": common, **schemas, **{f"Section {name}": each for name, each in sections.items()}}
    about = {title: table.get("description", "").partition("\n")[0] for title, table in tables.items()}
    lines: list[str] = []
    for title, table in tables.items():
        hidden = {"kind"} if table is common else {*common["properties"]} if title in schemas else ()
        lines += [f"## {title}\n", f"{about[title]}\n", *_table(table, hidden, about), ""]
    return "\n".join(lines)


def _table(schema: Mapping[str, Any], hidden: Collection[str], about: Mapping[str, str]) -> list[str]:
    """Rows of a schema's fields; what is not said of one is said of its section, or in its class's docstring."""
    attributes = {name: " ".join(text.split()) for name, text in _ATTRIBUTE.findall(schema.get("description", ""))}
    lines = ["| field | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in schema["properties"].items():
        section = _NAMED.search(json.dumps(field))
        said = field.get("description") or attributes.get(name) or (about[f"Section {section[1]}"] if section else "")
        default = "required"
        if "default" in field:
            default = f"`{json.dumps(field['default'])}`" if field["default"] is not None else "none"
            default = "its defaults" if isinstance(field["default"], dict) else default
        cells = name, _value(field), default, re.sub(r"\bNone: ", "none: ", said)
        if name not in hidden:
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return lines


def _value(field: Mapping[str, Any]) -> str:
    """The values of a field, in words, without null: the column of the default has it."""
    if "$ref" in field and (section := _NAMED.search(f'{field["$ref"]}"')):
        return f"section [{section[1]}](#section-{section[1].lower()})"
    if values := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{value}`" for value in values if value is not None)
    if parts := [part for part in field.get("anyOf", ()) if part.get("type") != "null"]:
        return " or ".join(dict.fromkeys(map(_value, parts)))
    if field.get("type") == "array":
        return f"list: {_value(field['items'])}"
    return _TYPES.get(field.get("type", ""), "`name: value` lines")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(f"{path.read_text().partition(MARK)[0]}{MARK}\n\n{page()}")
