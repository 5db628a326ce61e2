"""Functions of the kernels that a kernel calls, and a hash of what a launch compiles."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import triton

from ..runtime.launch import Launch
from .resources import specialized

_PACKAGE = __package__.rpartition(".")[0]


def launch_key(launch: Launch, arch: int) -> str:
    """A hash of all that the compiler is given: equal launches of equal source have one, whatever the comments."""
    types, marks = specialized(launch)
    constants = sorted((name, repr(value)) for name, value in launch.constants.items())
    given = triton.__version__, arch, types, constants, sorted(marks), launch.tile.options, _sources(launch.kernel)
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


@cache
def _sources(kernel: Any) -> tuple[str, ...]:
    """Source and constants of a kernel and of every function of the kernels' package that it reaches."""
    found, left = dict[FunctionType, str](), [_python(kernel)]
    while left:
        function = left.pop()
        if function in found:
            continue
        named = dict(_globals(function.__code__, function))
        constants = sorted((name, repr(x)) for name, x in named.items() if not isinstance(_python(x), FunctionType))
        found[function] = f"{function.__module__} {_code(function)} {constants}"
        left += [_python(x) for x in named.values() if isinstance(_python(x), FunctionType)]
    return tuple(sorted(found.values()))


def functions_named(function: FunctionType) -> set[FunctionType]:
    """Functions of the kernels' package that a function names, unwrapped from Triton's."""
    named = (_python(x) for _, x in _globals(function.__code__, function))
    return {x for x in named if isinstance(x, FunctionType)}


def _globals(code: CodeType, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Global variables and attributes of modules that the code names: functions of the package, and constants."""
    variables = function.__globals__
    for name in code.co_names:
        x = variables.get(name)
        if isinstance(x, ModuleType) and x.__name__.startswith(_PACKAGE):
            pairs = [(f"{name}.{attribute}", getattr(x, attribute, None)) for attribute in code.co_names]
        else:
            pairs = [(name, x)]
        yield from ((path, y) for path, y in pairs if _counts(y))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant, function)


def _counts(x: Any) -> bool:
    function = _python(x)
    if isinstance(function, FunctionType):
        return function.__module__.startswith(_PACKAGE)
    return isinstance(x, triton.language.constexpr | int | float | str | tuple)


def _python(x: Any) -> Any:
    """The function that Triton or Gluon wraps; another object as it is."""
    return getattr(x, "fn", x)


def _code(function: FunctionType) -> str:
    """A function without its docstring and comments, written as every version of Python writes its syntax tree."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.unparse(tree)  # ast.dump's fields differ between versions
