"""Environment variables and interpreters of points: what a spec may name, and the words for them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from jobs.schema.axes import AXES
from jobs.specs.validation import each_once

_SIZES = {axis.name: axis.size for axis in AXES}
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SET_BY_US = {
    "CUDA_VISIBLE_DEVICES": "ask for GPUs with resources.num_gpus",
    "CUDA_DEVICE_ORDER": "remove it",
    "OMP_NUM_THREADS": "set resources.num_cpus",
    "MKL_NUM_THREADS": "set resources.num_cpus",
    "PYTHONPATH": "give another interpreter in python",
    "TMPDIR": "remove it",
}
_READABLE = 60  # characters that a label shows of an environment or an interpreter


def env_text(env: Mapping[str, str]) -> str | None:
    """The axis `env`: "NAME=value NAME=value", sorted by name; None for no variables.

    Values are quoted as a shell needs them, so that different environments never have the same text.
    """
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())) or None


def suffix(text: str | None, index: int, what: str) -> str:
    """Ending of a point's label that tells its environment or interpreter from the spec's others.

    Args:
        text: the coordinate; None: no ending.
        index: its place in the spec, for a text too long to be read.
        what: the spec's field.
    """
    if text is None:
        return ""
    return f" [{text}]" if len(text) <= _READABLE else f" [{what} {index}]"


def _check_name(name: str) -> str:
    if fix := _SET_BY_US.get(name):
        raise ValueError(f"is set for each point by the orchestrator; {fix}")
    if not _NAME.fullmatch(name):
        raise ValueError("is no name of a variable; use letters, digits and '_', a letter first")
    return name


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed; remove them")
    return text


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError("is not an absolute path; give that of an interpreter, e.g. /opt/other/bin/python")
    return _printable(path)


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _distinct(envs: list[dict[str, str]]) -> list[dict[str, str]]:
    texts = [env_text(env) for env in envs]
    for text in filter(None, texts):
        if len(text) > _SIZES["env"]:
            raise ValueError(f"{text[:40]}... has {len(text)} characters; use at most {_SIZES['env']} in all")
    each_once([text or "{}" for text in texts])
    return envs


Environments = Annotated[
    list[dict[Annotated[str, AfterValidator(_check_name)], Annotated[str, AfterValidator(_printable)]]],
    BeforeValidator(_listed),
    Field(min_length=1),
    AfterValidator(_distinct),
]
Interpreters = Annotated[
    list[Annotated[str, Field(max_length=_SIZES["python"]), AfterValidator(_absolute)] | None],
    BeforeValidator(_listed),
    Field(min_length=1),
    AfterValidator(each_once),
]
