"""Triton's interpreter without what costs half of its time and finds nothing in the kernels' tests.

Seen in Triton 3.6 to 3.9: two tests of kernels took 8.8 s instead of 19.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def quicken() -> None:
    """Check no integer for overflow, as the compiler does not, and patch Triton's language once a launch.

    The interpreter patches it again at each call of a function within a kernel, where it already is patched.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    internals: Any = interpreter
    patch = internals._patch_lang

    def patch_once(fn: FunctionType) -> Any:
        modules = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        patched = not any(tl.core.is_builtin(module.load) for module in modules)
        return internals._LangPatchScope() if patched else patch(fn)

    internals.interpreter_builder.options = internals.InterpreterOptions(sanitize_overflow=False)
    internals._patch_lang = patch_once
