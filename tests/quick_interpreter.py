"""Triton's interpreter without what costs two thirds of its time and finds nothing in the kernels' tests.

Seen in Triton 3.6 to 3.9: two tests of kernels took 8.8 s instead of 19. Types that are kept: three took 15.8 s
of the processor instead of 21.4 (in 3.9.0).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def quicken() -> None:
    """Check no integer for overflow, as the compiler does not, patch Triton's language once a launch, keep types.

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
    _keep_types(tl.core, internals)


def _keep_types(core: Any, internals: Any) -> None:
    """Make each type of a block, and what a tensor takes from its type, once; nobody changes them."""
    made: dict[Any, Any] = {}
    make_type, make_tensor, np_dtype = core.block_type.__init__, core.tensor.__init__, internals._get_np_dtype

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        if type(element_ty) is not core.dtype:  # pointers of one name may differ
            return object.__new__(cls)
        key = (element_ty.name, *(x.value if isinstance(x, core.constexpr) else x for x in shape))
        return made.get(key) or made.setdefault(key, object.__new__(cls))

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in vars(self):
            make_type(self, element_ty, shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        kept = vars(type).get("of_tensors")
        if kept is None:
            make_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = kept

    def dtype_of(type: Any) -> Any:
        element = type.element_ty if isinstance(type, core.block_type) else type
        if isinstance(element, core.pointer_type):
            return np_dtype(element)
        if element.name not in dtypes:
            dtypes[element.name] = np_dtype(element)
        return dtypes[element.name]

    dtypes: dict[str, Any] = {}
    core.block_type.__new__, core.block_type.__init__ = staticmethod(new), init_type
    core.tensor.__init__, internals._get_np_dtype = init_tensor, dtype_of
