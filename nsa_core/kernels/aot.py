# pyright: reportMissingImports=false
"""Compiles every kernel as the operator would launch it, without a device, and prints its resources.

    python -m nsa_core.kernels.aot [--full] [--arch 80 90] [--heads 128/1 --dim 128] [--kernel selected]

The operator runs on meta tensors with its launches recorded instead of run, so that the pinned configurations are the
ones compiled. Registers and spills are read from the cubin. Exits 1 if a kernel takes more shared memory than a block
may have, spills more than `CompileCase.spill_limit`, if ptxas serializes its wgmma instructions, or if late rescaling
does not vote once for each product.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from ..config import NSAConfig
from . import operators
from .decode import step
from .runtime.launch import Launch, record
from .runtime.tiles import assume
from .runtime.tma import Tiled
from .training import cross_entropy, heads, swiglu

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory that one block may have
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int16: "i16"}
_NAMES |= {torch.int32: "i32", torch.int64: "i64"}


@dataclass(frozen=True)
class CompileCase:
    """Heads, head dims and dtype of an operator to compile."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def spill_limit(self) -> int:
        """Bytes of spills a thread may have: beyond a head dim of 128 two float32 accumulators fill the registers."""
        return 128 if max(self.dim, self.value_dim) <= 128 else 384

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} d{self.dim},{self.value_dim} {_NAMES[self.dtype]}"


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel.

    Attributes:
        shared: bytes of shared memory a block.
        registers, spills: registers, and bytes of spills, a thread.
        serialized: ptxas could not keep the wgmma instructions asynchronous, and waits after each.
        products, held: number of wgmma instructions, and of those with the first operand in registers.
        votes, rescales: number of votes on late rescaling, and of the products that follow one each, if a thread holds
            the rows that shared/rescale.py assumes.
    """

    case: CompileCase
    kernel: str
    arch: int
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
        within = self.shared <= SHARED[self.arch] and self.spills <= self.case.spill_limit
        return within and not self.serialized and self.votes == self.rescales


_BF16, _FP32 = torch.bfloat16, torch.float32
REPRESENTATIVE = (CompileCase(12, 2, 64, 64, _BF16), CompileCase(32, 8, 128, 128, _BF16))
FULL = (
    *(CompileCase(group * 2, 2, dim, dim, _BF16) for dim in (32, 64, 128, 256) for group in (1, 2, 3, 4, 6, 8, 16)),
    *(CompileCase(8, 2, *dims, _BF16) for dims in ((96, 96), (192, 192), (192, 128), (128, 64))),
    *(CompileCase(8, 2, dim, dim, dtype) for dim in (64, 128, 256) for dtype in (torch.float16, _FP32)),
)


def launches(case: CompileCase, arch: int) -> list[Launch]:
    """Launches of forward, backward, a decoding step and training of `case`, one for each kernel, constants and tile.

    Sequences are short and long, because their pinned tiles differ; keys are separate and shared.
    """
    with assume(arch), record() as seen:
        for tokens in (2048, 65_536):
            _run_once(case, tokens, shared=True)
            _run_once(case, tokens, shared=False)
        step.trace(case.heads, case.kv_heads, case.dim, case.value_dim, case.dtype)
        _train_once(case)
    return list({_identity(launch): launch for launch in seen}.values())


def _identity(launch: Launch) -> tuple[str, str]:
    return launch.kernel.__module__ + launch.kernel.__name__, str((launch.constants, launch.tile))


def _run_once(case: CompileCase, tokens: int, shared: bool) -> None:
    """Run a forward without gradients, then forward and backward, on meta tensors."""

    def made(heads: int, dim: int) -> Tensor:
        return torch.empty(1, tokens, heads, dim, dtype=case.dtype, device="meta", requires_grad=True)

    call = operators.Call(NSAConfig(), ("cmp", "slc", "win"), 0, 0.125, compresses=shared)
    q, gates = made(case.heads, case.dim), made(case.heads, 3)
    given = [(made(case.kv_heads, case.dim), made(case.kv_heads, case.value_dim)) for _ in range(1 if shared else 3)]
    pairs = given * 2 if shared else [operators.compress(*given[0], call.config), *given[1:]]
    with torch.no_grad():
        operators.attend(q, gates, None, pairs, call)
    out = operators.attend(q, gates, None, pairs, call)
    torch.autograd.grad(out, [q, gates, *(x for pair in given for x in pair)], torch.empty_like(out))


def _train_once(case: CompileCase) -> None:
    """Run the non-attention kernels of compiled training."""

    def made(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    width = (case.heads + 6 * case.kv_heads) * case.dim + 3 * case.heads
    y, bias, angles = made(1, 8, width + -width % 8), made(3 * case.heads), made(8, 1, case.dim // 2, dtype=_FP32)
    apart = heads.forward(y, bias, angles, angles, case.heads, case.kv_heads)
    heads.backward(apart, apart[-1], angles, angles, y.shape[-1])
    halves, logits = made(8, 4608), made(8, 50_304)
    swiglu.backward(halves, swiglu.forward(halves))
    cross_entropy.forward(logits, made(8, dtype=torch.int64))


def compile_for(case: CompileCase, launch: Launch, arch: int) -> Usage:
    """Resources of one launch, compiled as by Triton's run-time, which marks arguments that are multiples of 16."""
    names = [name for name in launch.kernel.arg_names if name in launch.arguments]
    signature = {name: _type(launch.arguments[name]) for name in names} | dict.fromkeys(launch.constants, "constexpr")
    signature = {name: signature[name] for name in launch.kernel.arg_names}
    sixteen = [["tt.divisibility", 16]]
    attributes = {
        (i,): sixteen for i, name in enumerate(launch.kernel.arg_names) if _divisible(launch.arguments.get(name))
    }
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(launch.kernel, signature, dict(launch.constants), attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.tile.options)
    registers, spills = _resources(compiled.asm["cubin"])
    name = f"{launch.kernel.__module__.removeprefix(f'{__package__}.')}.{launch.kernel.__name__}"
    ptx = compiled.asm["ptx"]
    products, held = (len(re.findall(rf"wgmma\.mma_async[^;]*{rest};", ptx)) for rest in ("", r"\}, *\{[^;]*"))
    votes, rescales = ptx.count("vote.sync.any"), ptx.count("bra DONE")
    used = compiled.metadata.shared, registers, spills, _serialized(ptx)
    return Usage(case, name, arch, *used, products, held, votes, rescales)


def _type(value: object) -> str:
    if isinstance(value, Tiled):
        return value.signature
    if isinstance(value, Tensor):
        return f"*{_NAMES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


def _divisible(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, read by cuobjdump."""
    tool = str(Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump")
    text = _told(cubin, tool, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def _serialized(ptx: str) -> bool:
    if "wgmma.mma_async" not in ptx:
        return False
    text = _told(ptx.encode(), get_ptxas(90).path, "-v", "-arch=sm_90a", "-o", "/dev/null")
    return "wgmma.mma_async instructions are serialized" in text


def _told(given: bytes, *command: str) -> str:
    """Output of the tool `command` for a file with the content `given`."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(given)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def usages(cases: Iterable[CompileCase], archs: Iterable[int], kernel: str = "") -> Iterator[Usage]:
    """Resources of every distinct launch of `cases`, once for each compute capability of `archs`.

    Args:
        kernel: a part of the names of the kernels to compile.
    """
    for arch in archs:
        done: set[tuple[object, ...]] = set()
        for case in cases:
            if case.dtype == torch.float32 and case.dim > 128 and arch < 90:
                continue  # the backend refuses it, as no tile fits
            for launch in launches(case, arch):
                key = *_identity(launch), case.dtype
                if key not in done and kernel in launch.kernel.__name__:
                    done.add(key)
                    yield compile_for(case, launch, arch)


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = map(int, text.split("/"))
    return heads, kv_heads


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels without a device.")
    parser.add_argument("--full", action="store_true", help="all head dims, groups and dtypes")
    parser.add_argument("--heads", type=_heads, metavar="H/KV", help="these query and kv heads alone, in bf16")
    parser.add_argument("--dim", type=int, default=128, help="head dim of --heads")
    parser.add_argument("--kernel", default="", metavar="PART", help="kernels with this in their names alone")
    parser.add_argument("--arch", type=int, nargs="+", default=sorted(SHARED), help="compute capabilities")
    options = parser.parse_args()
    bad, cases = 0, FULL if options.full else REPRESENTATIVE
    if options.heads:
        cases = (CompileCase(*options.heads, options.dim, options.dim, _BF16),)
    for use in usages(cases, options.arch, options.kernel):
        bad += not use.fits
        line = f"sm{use.arch} {use.case!s:22} {use.kernel:50} shared {use.shared:7} regs {use.registers:4}"
        line += f" spills {use.spills:5}" + f" held {use.held}/{use.products}" * (use.products > 0)
        line += f" rescales {use.rescales}/{use.votes}" * (use.votes + use.rescales > 0)
        print(f"{line}{' SERIALIZED' * use.serialized}{'' if use.fits else ' BAD'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
