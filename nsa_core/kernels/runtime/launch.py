# pyright: reportMissingImports=false
"""Launches: every kernel is started by `launch`, which can also record, omit or observe what it is asked for.

So the ahead-of-time check compiles without a device, memory is predicted without kernels, and times are told by stage.
Under torch.profiler each launch is a range named by its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
def omit() -> Iterator[None]:
    """Drop launches instead of running them; unlike `record`, no tensor is kept alive."""
    with handed_to(lambda launch: None):
        yield


@contextmanager
def handed_to(recorder: Callable[[Launch], None]) -> Iterator[None]:
    """Hand launches to `recorder` instead of running them."""
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
    """Whether launches are recorded, omitted or observed."""
    return _recorder.get() is not None or _observer is not None


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any], tile: Tile, *, stage: str
) -> None:
    """Run `kernel`, or hand the launch to the recorder. An empty grid runs nothing, nor do meta tensors.

    Args:
        kernel, grid, constants, tile, stage: as in `Launch`.
        arguments: the first is a tensor or `Tiled`; its device is the kernel's.
    """
    if 0 in grid:
        return
    asked, recorder = Launch(kernel, grid, arguments, constants, tile, stage), _recorder.get()
    if recorder is not None:
        recorder(asked)
    elif not _first(asked).is_meta:
        start(asked)


def _first(asked: Launch) -> Tensor:
    x = next(iter(asked.arguments.values()))
    return x.x if isinstance(x, Tiled) else x


def start(asked: Launch) -> Compiled | None:
    """Run a launch, under a profiler within a range of its stage; the compiled kernel, or None in the interpreter."""
    if profiler._is_profiler_enabled:
        with profiled_stage(asked.stage):
            return _start(asked)
    return _start(asked)


def _start(asked: Launch) -> Compiled | None:
    """Run a launch as `start` does, without a range.

    Triton's own launch inspects every argument each time, which takes longer than many of these kernels. Compiled
    kernels are kept here by what they depend on: names, constants, types, and whether pointers are multiples of 16.
    Whole numbers are plain arguments: one kernel serves all lengths. The key has the kernel's id, which stays its own:
    a kept entry keeps its kernel alive.
    """
    kernel, arguments, constants, tile = asked.kernel, asked.arguments, asked.constants, asked.tile
    device = _first(asked).get_device()
    if device >= 0 and device != torch.cuda.current_device():  # Triton starts kernels on the current one
        with torch.cuda.device(device):
            return _start(asked)
    if _observer is not None:
        _observer(Started(kernel.__name__, asked.stage, constants))
    key: list[Any] = [id(kernel), device, tile.warps, tile.stages, tile.registers, *arguments, *constants]
    key += constants.values()
    values: list[Any] = []
    unaligned = unaligned_names(kernel)
    for name, x in arguments.items():
        if isinstance(x, Tiled):
            key += x.kind
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
        kept.runner(asked.grid)(*kept.ordered([*values, *constants.values()]))
        return kept
    _generalize(kernel, arguments)
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
    _compiled[known] = Compiled(compiled, tuple(names.index(name) for name in kernel.arg_names))
    return _compiled[known]


def unaligned_names(kernel: Any) -> Sequence[str]:
    """Pointers of a kernel that is compiled alike whether they are multiples of 16 or not."""
    return getattr(kernel, "do_not_specialize_on_alignment", None) or ()


def compile_only(asked: Launch, device: torch.device) -> None:
    """Compile a launch's kernel for a GPU, as `start` would; the launch's tensors may be without memory."""
    kernel, arguments = asked.kernel, asked.arguments
    _generalize(kernel, arguments)
    given = arguments | asked.constants
    kinds = [
        x.descriptor() if isinstance(x, Tiled) else x.dtype if isinstance(x, Tensor) else x
        for x in map(given.get, kernel.arg_names)
    ]
    with torch.cuda.device(device):
        kernel.warmup(*kinds, grid=(1,), **asked.tile.options)


def _generalize(kernel: Any, arguments: Mapping[str, Any]) -> None:
    """Keep Triton from compiling again for whole numbers that are 1 or multiples of 16."""
    for param in getattr(kernel, "params", ()):  # the interpreter's functions have none
        param.do_not_specialize |= isinstance(arguments.get(param.name), int)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        kernel: Triton's compiled kernel.
        order: for each of its parameters, the index among a launch's arguments followed by its constants.
    """

    kernel: Any
    order: tuple[int, ...]

    def runner(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The function that starts it, given all parameters in order and, optionally, `stream`."""
        return self.kernel[(*grid, 1, 1)[:3]]

    def ordered(self, values: Sequence[Any]) -> list[Any]:
        """A launch's argument and constant values in the order of the kernel's parameters."""
        return [values[i] for i in self.order]


_compiled: dict[tuple[Any, ...], Compiled] = {}
