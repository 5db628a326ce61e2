"""Triton's interpreter without what costs most of its time and finds nothing in the kernels' tests.

In Triton 3.9.0 two tests of kernels took 8.8 s instead of 19 without the checks, three 15.8 s of the processor instead
of 21.4 with types kept, and decode_interpreted.py 32 s instead of 65 with shapes and numbers kept and topk by numpy.
"""

from types import FunctionType
from typing import Any

import numpy as np


def quicken() -> None:
    """Check no integer for overflow, as the compiler does not; do once what the interpreter does again and again."""
    from triton.runtime import interpreter

    internals: Any = interpreter
    internals.interpreter_builder.options = internals.InterpreterOptions(sanitize_overflow=False)
    _patch_once(internals)
    _keep_types(internals.tl.core, internals)
    _compare_at_once(internals.tl.core)
    _pass_what_fits(internals.tl.core, internals.TritonSemantic)
    _keep_shapes(internals.tl.core, internals.TritonSemantic)
    _sort_at_once(internals)


def _patch_once(internals: Any) -> None:
    """Patch Triton's language once a launch: not again at each call of a function within a kernel."""
    tl, patch = internals.tl, internals._patch_lang
    named: dict[FunctionType, list[Any]] = {}

    def patch_once(fn: FunctionType) -> Any:
        if fn not in named:
            named[fn] = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        patched = not any(tl.core.is_builtin(module.load) for module in named[fn])
        return internals._LangPatchScope() if patched else patch(fn)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = internals.TritonSemantic(builder)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return member(*args, **options)

        scope.set_attr(obj, name, call)

    internals._patch_lang, internals._patch_attr = patch_once, patch_attr


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
            self.sizes = tuple(map(int, self.shape))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        kept = type.__dict__.get("of_tensors")
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
    core.dtype.sizes = ()
    core.block_type.__new__, core.block_type.__init__ = staticmethod(new), init_type
    core.tensor.__init__, internals._get_np_dtype = init_tensor, dtype_of


def _compare_at_once(core: Any) -> None:
    """Look first for what compared types and unwrapped values mostly are: one object, and no sequence."""
    equals, unwrap, sequences = core.dtype.__eq__, core._unwrap_if_constexpr, (list, tuple, core.tuple)

    def unwrap_one(x: Any) -> Any:
        if type(x) is core.constexpr:
            return x.value
        return unwrap(x) if isinstance(x, sequences) else x

    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    core._unwrap_if_constexpr = unwrap_one


def _pass_what_fits(core: Any, semantic: Any) -> None:
    """Take operands of one type as they are, and make each number that meets a type into a tensor once.

    No tensor's data is changed in place, so that numbers can be kept. Their text tells 1 from 1.0, True and -0.0.
    """
    check, promote = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
    promoted: dict[Any, Any] = {}
    numbers: dict[Any, Any] = {}

    def is_plain(x: Any) -> bool:
        return type(x) is core.tensor and type(x.dtype) is core.dtype

    def check_operands(self: Any, x: Any, y: Any, *options: Any, **more: Any) -> Any:
        if is_plain(x) and type(y) in (bool, int, float):
            key = x.type.name, repr(y), options, *more.items()
            if key in numbers:
                return x, numbers[key]
            operands = check(self, x, y, *options, **more)
            if operands[0] is x:  # else the number changes the tensor's type
                numbers[key] = operands[1]
            return operands
        if is_plain(x) and is_plain(y) and x.dtype is y.dtype and not options[3:] and not more.get("div_or_mod"):
            return self.broadcast_impl_value(x, y)
        return check(self, x, y, *options, **more)

    def promote_once(self: Any, *given: Any) -> Any:
        key = tuple([x.name if type(x) is core.dtype else x for x in given])
        if key not in promoted:
            promoted[key] = promote(self, *given)
        return promoted[key]

    semantic.binary_op_type_checking_impl, semantic.computation_type_impl = check_operands, promote_once


def _keep_shapes(core: Any, semantic: Any) -> None:
    """Work out once what two shapes become, and each type of another shape."""
    broadcast, joint = semantic.broadcast_impl_value, dict[Any, tuple[int, ...]]()

    def broadcast_unlike(self: Any, x: Any, y: Any) -> Any:
        a, b = x.type.sizes, y.type.sizes
        if a == b:
            return x, y
        if a and b and len(a) != len(b):
            return broadcast(self, x, y)
        if (a, b) not in joint:
            joint[a, b] = np.broadcast_shapes(a, b)
        both = joint[a, b]
        return (x if a == both else resized(self, x, both)), (y if b == both else resized(self, y, both))

    def resized(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
        types, build = x.type.__dict__.setdefault("resized", {}), self.builder
        if sizes not in types:
            types[sizes] = core.block_type(x.dtype, list(sizes))
        wide = types[sizes]
        made = build.create_broadcast(x.handle, sizes) if x.type.sizes else build.create_splat(wide, x.handle)
        return self.tensor(made, wide)

    semantic.broadcast_impl_value = broadcast_unlike


def _sort_at_once(internals: Any) -> None:
    """Let numpy find the largest numbers, as it does all other reductions; Triton's way compares pair by pair."""
    tl = internals.tl

    def topk(x: Any, k: int, dim: int | None = None, descending: bool = True) -> Any:
        assert dim in (None, -1, len(x.shape) - 1)
        found = np.sort(x.handle.data, axis=-1)
        found = np.ascontiguousarray(found[..., : -k - 1 : -1] if descending else found[..., :k])
        return tl.tensor(internals.TensorHandle(found, x.dtype), tl.block_type(x.dtype, list(found.shape)))

    tl.topk = topk
