"""YAML as specs and rules' files use it: repeated keys are refused, and 1e-3 is a number, as in YAML 1.2."""

from __future__ import annotations

import re
from typing import Any

import yaml


class YamlError(ValueError):
    """A text that is not YAML; the message says why, in one line."""


class RepeatedKeyError(YamlError):
    """A mapping with two values for one key. One line: key, lines, fix."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise RepeatedKeyError(
                    f"{key.value}: given twice, in lines {lines[name]} and {line}; keep one of the two"
                )
            lines[name] = line
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def read_yaml(text: str) -> Any:
    """The content of a YAML document.

    Raises:
        YamlError: it is not YAML, or holds what has no value (the date 2001-99-99), or is nested too deep to read.
        RepeatedKeyError: a key is given twice.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise YamlError("it is nested too deep") from None
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError) as err:  # a ValueError: a date or number that does not exist
        raise YamlError(" ".join(str(err).split())) from None
