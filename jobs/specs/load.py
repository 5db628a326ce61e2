"""A spec's file as a checked spec of its kind. Every mistake names its field, the value and the fix."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.schema.plain_text import shown
from jobs.specs.kinds import kind_module, kinds
from jobs.specs.spec import JobSpec, SpecError
from jobs.specs.validation import describe
from jobs.specs.yaml_text import AmbiguousError, YamlError, read_mapping, read_yaml


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec at `path` with `overrides` ("resources.num_gpus=1") laid over it. Raises SpecError."""
    try:
        data = read_mapping(path, "spec", "kind: scaling")
    except YamlError as err:
        raise SpecError(str(err)) from None
    for item in overrides:
        _override(data, item)
    return parse_spec(data)


def parse_spec(data: Mapping[str, Any]) -> JobSpec:
    """The job that a spec's content describes. Raises SpecError."""
    kind = data.get("kind")
    if "kind" not in data:
        raise SpecError(f"kind: missing; begin the spec with 'kind: ' and one of {', '.join(sorted(kinds()))}")
    if not isinstance(kind, str):
        raise SpecError(f"kind: {shown(kind)} is no job kind; use one of {', '.join(sorted(kinds()))}")
    module = kind_module(kind)
    if next(iter(data)) != "kind":
        raise SpecError(f"kind: {kind!r} must be the spec's first key; move it to the top")
    try:
        return module.Spec.model_validate(data)
    except ValidationError as err:
        raise SpecError("\n".join(describe(err, data, "spec"))) from None


def _override(data: dict[str, Any], item: str) -> None:
    name, eq, text = item.partition("=")
    if not eq or not name:
        raise SpecError(f"--set: {shown(item)} is no setting; write key=value, e.g. --set lengths=[512,1024]")
    node = data
    *parents, last = name.split(".")
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise SpecError(f"--set: {shown(item)}: {shown(part)} is no section of the spec; name an existing one")
    try:
        node[last] = read_yaml(text)
    except AmbiguousError as err:
        raise SpecError(str(err)) from None
    except YamlError:
        raise SpecError(f"--set: {shown(item)}: {shown(text)} is not YAML; quote it") from None
