# pyright: reportMissingImports=false
"""Launches: every kernel is started by `launch`, which can also hand over or observe what it is asked for.

So the ahead-of-time check compiles without a device, memory is predicted without kernels, and times are told by stage.
Under torch.profiler each launch is a range named by its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler

from ...errors import BackendError
from ...routes import profiled_stage
from .tiles import Tile
from .tma import Tiled


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for.

    Attributes:
        kernel: a function compiled by Triton or Gluon.
        grid: programs along each axis.
        arguments: tensors, `Tiled` tensors and numbers by the kernel's names.
        constants: compile-time constants by the kernel's names.
        tile: the pinned configuration.
        stage: the operator's stage that the kernel works for, as metrics name it.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tile: Tile
    stage: str


_recorder: ContextVar[Callable[[Launch], None] | None] = ContextVar("nsa_core_kernel_recorder", default=None)


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect launches instead of running them; the kernels' outputs stay unwritten."""
    seen: list[Launch] = []
    with handed_to(seen.append):
        yield seen


@contextmanager
def handed_to(recorder: Callable[[Launch], None]) -> Iterator[None]:
    """Hand launches to `recorder` instead of running them; it decides whether their tensors are kept alive."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@dataclass(frozen=True)
class Started:
    """One launch that was made: the kernel's name, its stage and its compile-time constants."""

    kernel: str
    stage: str
    constants: Mapping[str, Any]


# A global, not a context variable: autograd runs the backward of a CUDA operator in another thread.
_observer: Callable[[Started], None] | None = None


@contextmanager
def observe() -> Iterator[list[Started]]:
    """Collect the launches that any thread makes within the block, in order; they run, and no tensor is kept alive.

    Nothing is replayed within the block (replay.py), so that the host takes longer.
    """
    global _observer
    seen: list[Started] = []
    before, _observer = _observer, seen.append
    try:
        yield seen
    finally:
        _observer = before


def is_watched() -> bool:
    """Whether launches are handed over or observed."""
    return _recorder.get() is not None or _observer is not None


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any], tile: Tile, *, stage: str
) -> None:
    """Run `kernel`, or hand the launch to the recorder. Nothing runs for an empty grid, meta tensors or fake ones.

    Args:
        kernel, grid, constants, tile, stage: as in `Launch`.
        arguments: the first is a tensor or `Tiled`; its device is the kernel's.
    """
    if 0 in grid:
        return
    asked, recorder = Launch(kernel, grid, arguments, constants, tile, stage), _recorder.get()
    first = next(iter(arguments.values()))
    x = first.x if isinstance(first, Tiled) else first
    if recorder is not None:
        recorder(asked)
    elif not (x.is_meta or isinstance(x, FakeTensor)):
        start(asked)


# A kernel compiled by Triton, and what puts a launch's arguments and constants in the order of its parameters.
Compiled = tuple[Any, Callable[[list[Any]], tuple[Any, ...]]]
_compiled: dict[tuple[Any, ...], Compiled] = {}


def start(asked: Launch) -> Compiled | None:
    """Run a launch, under a profiler within a range of its stage; the compiled kernel, or None in the interpreter."""
    first = next(iter(asked.arguments.values()))
    device = (first.x if isinstance(first, Tiled) else first).get_device()
    elsewhere = device >= 0 and device != torch.cuda.current_device()  # Triton starts kernels on the current one
    with (
        profiled_stage(asked.stage) if profiler._is_profiler_enabled else nullcontext(),
        torch.cuda.device(device) if elsewhere else nullcontext(),
    ):
        if _observer is not None:
            _observer(Started(asked.kernel.__name__, asked.stage, asked.constants))
        return _start(asked, device)


def _start(asked: Launch, device: int) -> Compiled | None:
    """Run a launch on the current device.

    Triton's own launch inspects every argument each time, which takes longer than many of these kernels. Compiled
    kernels are kept here by what they depend on: names, constants, types, and whether pointers are multiples of 16.
    Whole numbers are plain arguments: one kernel serves all lengths. The key has the kernel's id, which stays its own:
    a kept entry keeps its kernel alive.
    """
    kernel, arguments, constants, tile = asked.kernel, asked.arguments, asked.constants, asked.tile
    key: list[Any] = [id(kernel), device, tile.warps, tile.stages, tile.registers, *arguments, *constants]
    key += constants.values()
    values: list[Any] = []
    unaligned = getattr(kernel, "do_not_specialize_on_alignment", None) or ()
    for name, x in arguments.items():
        if isinstance(x, Tiled):
            key += x.x.dtype, *x.block
            x = x.descriptor()
        elif isinstance(x, Tensor):
            key.append(x.dtype)
            x = x.data_ptr()  # an integer: for a tensor, Triton would ask the driver for its address
            key.append(x & 15 == 0 or name in unaligned)
        elif isinstance(x, int):
            key.append(-(1 << 31) <= x < 1 << 31)
        values.append(x)
    known = tuple(key)
    kept = _compiled.get(known)
    if kept is not None:
        compiled, ordered = kept
        compiled[(*asked.grid, 1, 1)[:3]](*ordered([*values, *constants.values()]))
        return kept
    for param in getattr(kernel, "params", ()):  # no compilation for numbers that are 1 or multiples of 16
        param.do_not_specialize |= isinstance(arguments.get(param.name), int)
    described = {name: x.descriptor() if isinstance(x, Tiled) else x for name, x in arguments.items()}
    try:
        compiled = kernel[asked.grid](**described, **constants, **tile.options)
    except Exception as err:
        from triton import OutOfResources  # here, for this module is also imported without Triton

        if not isinstance(err, OutOfResources):
            raise
        reason = f"takes more {err.name} than this GPU has ({err.required}, at most {err.limit})"
        raise BackendError("backend", "'triton'", f'{kernel.__name__} {reason}; use backend="chunked"') from err
    if compiled is None:  # the interpreter
        return None
    names = [*arguments, *constants]
    kept = _compiled[known] = compiled, itemgetter(*(names.index(name) for name in kernel.arg_names))
    return kept


def compile_only(asked: Launch, device: torch.device) -> None:
    """Compile a launch's kernel for a GPU, as `start` would; the launch's tensors may be without memory."""
    kernel, given = asked.kernel, asked.arguments | asked.constants
    for param in kernel.params:  # as in `_start`; Triton 3.6 refuses a constant among them
        param.do_not_specialize |= isinstance(asked.arguments.get(param.name), int)
    kinds = [
        x.descriptor() if isinstance(x, Tiled) else x.dtype if isinstance(x, Tensor) else x
        for x in map(given.get, kernel.arg_names)
    ]
    with torch.cuda.device(device):
        kernel.warmup(*kinds, grid=(1,), **asked.tile.options)
