"""Versions that the kernels were run with on a GPU, and whether the Triton installed here can be used.

The ranges are stated here alone; pyproject.toml's bounds are checked against them by tests/deploy/test_install.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from inspect import getsource
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class Tested:
    """Minor versions of a package, the first and the last, that tests/gpu passed with on a card."""

    package: str
    first: tuple[int, int]
    last: tuple[int, int]

    def __contains__(self, version: str) -> bool:
        """Whether a version ("3.6.0", "2.11.0+cu130") is in the range; one that cannot be read is not."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self.first <= (int(found[1]), int(found[2])) <= self.last

    def __str__(self) -> str:
        return "{}.{} to {}.{}".format(*self.first, *self.last)

    @property
    def requirement(self) -> str:
        """The range as pip takes it: "triton>=3.6,<3.10"."""
        (major, minor), (last_major, last_minor) = self.first, self.last
        return f"{self.package}>={major}.{minor},<{last_major}.{last_minor + 1}"


TRITON = Tested("triton", (3, 6), (3, 9))
TORCH = Tested("torch", (2, 11), (2, 13))

_MISSING = 'it needs Triton: pip install "nsa-bench[gpu]"'
_NAMES = ("triton", "pytorch-triton")  # PyTorch's nightly builds have their own
_KERNELS = "nsa_core.kernels"
_DOORS = ("operators", "decode.step", "training.cross_entropy", "training.heads", "training.swiglu")


def untested(version: str) -> str | None:
    """Reason why the kernels do not run with this version of Triton, with the fix; None if they were run with it."""
    if version in TRITON:
        return None
    return f'Triton {version} is untested, the kernels were run with {TRITON}: pip install "nsa-bench[gpu]"'


def triton_version() -> str | None:
    """Version of the installed Triton; None without one."""
    if find_spec("triton") is None:
        return None
    for name in _NAMES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        return str(import_module("triton").__version__)  # on the path, but not installed: a source tree
    except Exception:
        return "of an unknown version"


@cache
def triton_problem() -> str | None:
    """Reason why the kernels cannot run with the Triton here, with the fix; None if they can. Found once a process.

    Importing the kernels takes about half a second, and no driver.
    """
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA's GPUs, and this PyTorch is for AMD's"
    version = triton_version()
    if version is None:
        return _MISSING
    if reason := untested(version):
        return reason
    try:
        lacking = next(_lacking(_load()), None)
    except Exception as err:  # whatever the import raises, other backends remain
        lacking = f"{type(err).__name__}: {str(err).partition(chr(10))[0]}"
    if lacking is None:
        return None
    again = f'pip install --force-reinstall "{TRITON.requirement}"'
    return f"the kernels do not load with the Triton {version} installed here ({lacking}): {again}"


def _load() -> list[ModuleType]:
    for door in _DOORS:
        import_module(f"{_KERNELS}.{door}")
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(f"{_KERNELS}.")]


def _lacking(modules: Iterable[ModuleType]) -> Iterator[str]:
    """Names that the modules' functions take from Triton and that it does not have.

    A kernel's body is compiled when it is first launched: only then would a renamed function be missed.
    """
    for module in modules:
        try:
            tree = ast.parse(getsource(module))
        except OSError:  # no source at hand, so that nothing can be compiled from it, either
            continue
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            imported = [node for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
            names = dict(vars(module))
            for source, alias in ((node.module or "", alias) for node in imported for alias in node.names):
                if _is_triton(source):
                    names[alias.asname or alias.name] = _imported(source, alias.name)
                    if names[alias.asname or alias.name] is None:
                        yield f"{source} has no {alias.name}"
            used = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
            yield from filter(None, (_absent(node, names) for node in used))


def _imported(source: str, name: str) -> Any:
    """The value of `from source import name`; None if there is none."""
    module = import_module(source)
    if not hasattr(module, name) and hasattr(module, "__path__") and find_spec(f"{source}.{name}"):
        import_module(f"{source}.{name}")
    return getattr(module, name, None)


def _absent(node: ast.Attribute, names: Mapping[str, Any]) -> str | None:
    """The attribute as text if its value, a module of Triton or what is in one, lacks it."""
    value = _value(node.value, names)
    if value is None or hasattr(value, node.attr):
        return None
    return f"{getattr(value, '__name__', ast.unparse(node.value))} has no {node.attr}"


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The module of Triton that the expression names; None if it names none."""
    if isinstance(node, ast.Name):
        value = names.get(node.id)
    elif isinstance(node, ast.Attribute):
        value = getattr(_value(node.value, names), node.attr, None)
    else:
        return None
    return value if isinstance(value, ModuleType) and _is_triton(value.__name__) else None


def _is_triton(name: str | None) -> bool:
    return name is not None and name.split(".")[0] == "triton"
