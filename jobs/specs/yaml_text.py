"""YAML as specs and rules' files use it: repeated keys are refused, and numbers are those of YAML 1.2."""

import re
from pathlib import Path
from typing import Any

import yaml

from jobs.schema.plain_text import in_a_line, shown
from jobs.specs.user_files import open_regular


class YamlError(ValueError):
    """A text that is not YAML; the message says why, in one line."""


class AmbiguousError(YamlError):
    """A key with two values, or a number that is not what it looks like. One line: what, where, fix."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise AmbiguousError(
                    f"{shown(name)[1:-1]}: given twice, in lines {lines[name]} and {line}; keep one of the two"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Refuse what is a number of base 8 or 60 in YAML 1.1: 0512 was run as 330, 1:30 as 90."""
        integer = node.tag.endswith(":int")
        value = self.construct_yaml_int(node) if integer else self.construct_yaml_float(node)
        if ":" in node.value or (integer and re.match(r"[-+]?0[\d_]", node.value)):
            what = f"{shown(node.value)[1:-1]}: YAML reads {shown(value)} in line {node.start_mark.line + 1}"
            raise AmbiguousError(f"{what}; write it in decimal digits, or a text in quotes")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def read_mapping(path: Path, field: str, beginning: str) -> dict[Any, Any]:
    """The mapping in the YAML file of a user; messages call it `field`, and say what it begins with.

    Raises YamlError: the file cannot be read, is not YAML or holds no mapping; a whole message with field and fix.
    """
    name = shown(str(path))
    try:
        with open_regular(path) as file:
            data = read_yaml(file.read().decode())
    except OSError as err:
        raise YamlError(f"{field}: {name} cannot be read ({err.strerror}); give the path of a YAML file") from None
    except AmbiguousError:
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
