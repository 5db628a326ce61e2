"""Pydantic's errors as readable lines: the field's path in the file, the value, and the fix.

Used for specs, gate rules and settings. Imports pydantic and what is light here, so that every package can use it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jobs.schema.plain_text import in_a_line, shown

_SECTION = "write a section of 'key: value' lines"
# Fixes for error types whose message in Pydantic states only the rule.
_FIXES = {
    "int_type": "write a whole number in digits, e.g. 1024",
    "float_type": "write a number, e.g. 0.5",
    "finite_number": "write it in digits, e.g. 8",
    "bool_type": "write true or false",
    "string_type": "write a text, in quotes",
    **dict.fromkeys(("list_type", "tuple_type"), "write a list, e.g. [a, b]"),
    "too_short": "name at least one",
    **dict.fromkeys(("dict_type", "is_instance_of", "dataclass_exact_type", "model_type"), _SECTION),
    "string_pattern_mismatch": "begin with a letter or digit, go on with letters, digits, '.', '_' and '-'",
    "invalid_key": "put it in quotes, or remove it",
}
_PATH = 200  # characters of a field's path
# A check of several fields begins its message with the field to mend: "cmp_stride: 24: use a divisor ...".
_NAMES_A_FIELD = re.compile(r"([a-z][a-z0-9_.]*): (.*)", re.DOTALL)


def describe(err: ValidationError, data: Any, whole: str, kinds: Sequence[str] = ()) -> list[str]:
    """One line for each wrong field: path, value, mistake and fix.

    Args:
        data: the content that was validated.
        whole: its name ("spec"), for mistakes that concern no single field.
        kinds: the values that `kind` may have if it chooses among several models.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    for error in err.errors(include_url=False):
        section = _path_in(data, error["loc"], keep_last=error["type"] == "missing")
        field, message = split(error, in_a_line(".".join(section), _PATH), kinds)
        lines[field or whole].append(message)
    return [f"{field}: " + " or ".join(dict.fromkeys(messages)) for field, messages in lines.items()]


def split(error: ErrorDetails, section: str, kinds: Sequence[str] = ()) -> tuple[str, str]:
    """Path of the field to mend (below `section` if the message names one); and value, mistake and fix as text."""
    given, message = error["input"], error["msg"].removeprefix("Value error, ")
    value = shown(str(given) if isinstance(given, PurePath) else given)
    match error["type"]:
        case "extra_forbidden":
            return section, f"unknown key (value {value}); remove it or correct its spelling"
        case "missing":
            return section, "missing; add it"
        case "union_tag_invalid" | "union_tag_not_found":
            return section, f"kind is unknown or missing; use {', '.join(kinds[:-1])} or {kinds[-1]}"
        case "value_error" if named := _NAMES_A_FIELD.match(message):
            return f"{section}.{named[1]}".removeprefix("."), named[2]
        case "value_error" if isinstance(given, Mapping):
            return section, message
    fix = _FIXES.get(error["type"])
    return section, f"{value}: {message}; {fix}" if fix else f"{value}: {message}"


def _path_in(data: Any, location: Sequence[int | str], *, keep_last: bool) -> list[str]:
    """Keys that lead to `location` in `data`, list items by their `rule` or `name` if they have one.

    `keep_last` keeps a key that `data` lacks.
    """
    path = []
    member = False  # whether the next part, which is no key, names the member of a union chosen by `kind`
    for part in location:
        if member:
            member = False
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            named = data if isinstance(data, dict) else {}
            member = "kind" in named
            path.append(str(named.get("rule") or named.get("name") or part))
        elif isinstance(data, Mapping) and part in data:
            data = data[part]
            path.append(str(part))
    return [*path, str(location[-1])] if keep_last else path


def each_once(values: Sequence[Any]) -> Sequence[Any]:
    """A list of a spec, for a validator. Raises ValueError: a value is in it more than once."""
    repeated = dict.fromkeys("null" if value is None else str(value) for value in values if values.count(value) > 1)
    if repeated:
        raise ValueError(f"{', '.join(repeated)} appears more than once; name each once")
    return values
