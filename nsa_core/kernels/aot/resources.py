# pyright: reportMissingImports=false
"""One launch: a hash of what the compiler is given, and what the compiled kernel takes."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from ..runtime.launch import Launch
from ..runtime.tma import Tiled
from .cases import CompileCase, launches

_PACKAGE = __package__.rpartition(".")[0]
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that one block may have
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_TYPES |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class Usage(CompileCase):
    """Resources of a kernel compiled for a case.

    It fits if it takes no more shared memory than a block may have, spills little, ptxas serialized none of its wgmma
    instructions, and late rescaling votes once for each product.

    Attributes:
        shared: bytes of shared memory a block.
        registers, spills: registers, and bytes of spills, a thread.
        serialized: ptxas could not keep the wgmma instructions asynchronous, and waits after each.
        products, held: number of wgmma instructions, and of those with the first operand in registers.
        votes, rescales: number of votes on late rescaling, and of the products that follow one each, if a thread holds
            the rows that shared/rescale.py assumes.
    """

    kernel: str
    shared: int
    registers: int
    spills: int
    serialized: bool
    products: int
    held: int
    votes: int
    rescales: int

    @property
    def fits(self) -> bool:
        # Beyond a head dim of 128 two float32 accumulators fill the registers.
        spills = 128 if max(self.dim, self.value_dim) <= 128 else 384
        within = self.shared <= SHARED[self.arch] and self.spills <= spills
        return within and not self.serialized and self.votes == self.rescales

    def __str__(self) -> str:
        case = f"{self.heads}/{self.kv_heads} d{self.dim},{self.value_dim} {self.dtype}"
        line = f"sm{self.arch} {case:22} {self.kernel:50} shared {self.shared:7} regs {self.registers:4}"
        line += f" spills {self.spills:5}" + f" held {self.held}/{self.products}" * (self.products > 0)
        line += f" rescales {self.rescales}/{self.votes}" * (self.votes + self.rescales > 0)
        return f"{line}{' SERIALIZED' * self.serialized}{'' if self.fits else ' BAD'}"


def specialized(launch: Launch) -> tuple[dict[str, str], dict[tuple[int], list[list[object]]]]:
    """Types by argument, and the indices of those that Triton's run-time marks as multiples of 16: tensors."""
    names = launch.kernel.arg_names
    unaligned = launch.kernel.do_not_specialize_on_alignment or ()
    types = {name: _type(launch.arguments[name]) if name in launch.arguments else "constexpr" for name in names}
    tensors = {name for name, x in launch.arguments.items() if isinstance(x, Tensor) and name not in unaligned}
    return types, {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in tensors}


def kernel_names(case: CompileCase) -> dict[str, str]:
    """Kernels' names by the keys of their launches."""
    return {launch_key(launch, case.arch): launch.kernel.__name__ for launch in launches(case)}


@lru_cache(maxsize=1)  # a process compiles one case's launches after another
def keyed(case: CompileCase) -> dict[str, Launch]:
    """Launches of a case by their keys."""
    return {launch_key(launch, case.arch): launch for launch in launches(case)}


def compile_for(case: CompileCase, key: str) -> Usage:
    """Resources of a case's launch with this key, compiled as by Triton's run-time."""
    launch = keyed(case)[key]
    types, marks = specialized(launch)
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(launch.kernel, types, dict(launch.constants), marks)
    compiled = triton.compile(source, target=GPUTarget("cuda", case.arch, 32), options=launch.tile.options)
    ptx, tools = compiled.asm["ptx"], Path(str(triton.__file__)).parent / "backends/nvidia/bin"
    text = _output(compiled.asm["cubin"], str(tools / "cuobjdump"), "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)  # registers, and bytes of local memory, a thread
    assert found is not None, text
    products, held = (len(re.findall(rf"wgmma\.mma_async[^;]*{rest};", ptx)) for rest in ("", r"\}, *\{[^;]*"))
    assembled = _output(ptx.encode(), get_ptxas(90).path, "-v", "-arch=sm_90a", "-o", "/dev/null") if products else ""
    module = launch.kernel.__module__.removeprefix(f"{_PACKAGE}.")
    return Usage(
        **asdict(case),
        kernel=f"{module}.{launch.kernel.__name__}",
        shared=compiled.metadata.shared,
        registers=int(found[1]),
        spills=int(found[2]),
        serialized="wgmma.mma_async instructions are serialized" in assembled,
        products=products,
        held=held,
        votes=ptx.count("vote.sync.any"),
        rescales=ptx.count("bra DONE"),
    )


def _type(value: object) -> str:
    if isinstance(value, Tiled):
        return f"tensordesc<{_TYPES[value.x.dtype]}{value.block},{value.layout!r}>"
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


def _output(given: bytes, *command: str) -> str:
    """Output of the tool `command` for a file with the content `given`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(given)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def launch_key(launch: Launch, arch: int) -> str:
    """A hash of all that the compiler is given: equal launches of equal source have one, whatever the comments."""
    types, marks = specialized(launch)
    constants = sorted((name, repr(value)) for name, value in launch.constants.items())
    given = triton.__version__, arch, types, constants, sorted(marks), launch.tile.options, _sources(launch.kernel)
    return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


@cache
def _sources(kernel: Any) -> tuple[str, ...]:
    """Source and constants of a kernel and of every function of the kernels' package that it reaches.

    Sources are without docstrings and comments, written as every version of Python writes its syntax tree.
    """
    found, left = dict[FunctionType, str](), [unwrapped(kernel)]
    while left:
        function = left.pop()
        if function in found:
            continue
        named = {name: unwrapped(x) for name, x in globals_named(function.__code__, function)}
        functions = {name: x for name, x in named.items() if isinstance(x, FunctionType)}
        constants = sorted((name, repr(x)) for name, x in named.items() if name not in functions)
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        if ast.get_docstring(tree) is not None:
            tree.body = tree.body[1:]
        found[function] = f"{function.__module__} {ast.unparse(tree)} {constants}"  # ast.dump differs between versions
        left += functions.values()
    return tuple(sorted(found.values()))


def globals_named(code: CodeType, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Global variables and attributes of modules that the code names: functions of the package, and constants."""
    variables = function.__globals__
    for name in code.co_names:
        x = variables.get(name)
        if isinstance(x, ModuleType) and x.__name__.startswith(_PACKAGE):
            pairs = [(f"{name}.{attribute}", getattr(x, attribute, None)) for attribute in code.co_names]
        else:
            pairs = [(name, x)]
        for path, y in pairs:
            called = unwrapped(y)
            is_ours = isinstance(called, FunctionType) and called.__module__.startswith(_PACKAGE)
            if is_ours or isinstance(y, triton.language.constexpr | int | float | str | tuple):
                yield path, y
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_named(constant, function)


def unwrapped(x: Any) -> Any:
    """The function that Triton or Gluon wraps; another object as it is."""
    return getattr(x, "fn", x)
