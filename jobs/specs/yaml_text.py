"""YAML as specs and rules' files use it: repeated keys are refused, and 1e-3 is a number, as in YAML 1.2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from jobs.schema.plain_text import in_a_line, shown


class YamlError(ValueError):
    """A text that is not YAML; the message says why, in one line."""


class RepeatedKeyError(YamlError):
    """A mapping with two values for one key. One line: key, lines, fix."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise RepeatedKeyError(
                    f"{shown(name)[1:-1]}: given twice, in lines {lines[name]} and {line}; keep one of the two"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def read_mapping(path: Path, field: str, beginning: str) -> dict[Any, Any]:
    """The mapping in the YAML file of a user.

    Args:
        field: the name of the file in messages: "spec".
        beginning: how such a file begins, for one that holds no mapping.

    Raises:
        YamlError: the file cannot be read, is not YAML or holds no mapping; a whole message with field and fix.
    """
    name = shown(str(path))
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise YamlError(f"{field}: {name} is no file; give the path of a YAML file")
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise YamlError(f"{field}: {name} cannot be read ({err.strerror}); give the path of a YAML file") from None
    except RepeatedKeyError:
        raise
    except (YamlError, UnicodeDecodeError) as err:
        raise YamlError(f"{field}: {name} is not YAML ({err}); mend its syntax") from None
    if not isinstance(data, dict):
        raise YamlError(f"{field}: {name} holds no mapping; start it with {beginning!r}")
    return data


def read_yaml(text: str) -> Any:
    """The content of a YAML document. Raises YamlError, also for what has no value (the date 2001-99-99)."""
    try:
        return yaml.load(text, _Loader)
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as err:  # a ValueError: a date or number that does not exist
        raise YamlError(in_a_line(err)) from None
