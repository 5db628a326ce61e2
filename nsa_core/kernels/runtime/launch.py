# pyright: reportMissingImports=false
"""How kernels are started.

Every launch goes through `launch`, so that the ahead-of-time check can record what would run and compile it without a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tiles import Tile
from .tma import Tiled


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for: kernel, programs, arguments by name, compile-time constants, configuration."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tile: Tile


_recorder: ContextVar[Callable[[Launch], None] | None] = ContextVar("nsa_core_kernel_recorder", default=None)


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect launches instead of running them. What the kernels would have written stays unwritten."""
    seen: list[Launch] = []
    with handed_to(seen.append):
        yield seen


@contextmanager
def omit() -> Iterator[None]:
    """Run no kernel, as `record`, but keep no tensor alive."""
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
    """One launch that was made: the kernel's name and its compile-time constants."""

    kernel: str
    constants: Mapping[str, Any]


# Of the process and not of a context: autograd runs the backward of a CUDA operator in a thread of its own.
_observer: Callable[[Started], None] | None = None


@contextmanager
def observe() -> Iterator[list[Started]]:
    """Collect the launches that any thread makes meanwhile, in order. They run, and no tensor is kept alive.

    Nothing is replayed meanwhile (replay.py): the host takes longer than without.
    """
    global _observer
    seen: list[Started] = []
    before, _observer = _observer, seen.append
    try:
        yield seen
    finally:
        _observer = before


def is_watched() -> bool:
    """Whether somebody is to be told of launches."""
    return _recorder.get() is not None or _observer is not None


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], constants: dict[str, Any], tile: Tile
) -> None:
    """Run `kernel` on `grid`, or hand it to the recorder. An empty grid runs nothing. A tensor is first, or `Tiled`."""
    if 0 in grid:
        return
    asked, recorder = Launch(kernel, grid, arguments, constants, tile), _recorder.get()
    if recorder is None:
        start(asked)
    else:
        recorder(asked)


def start(asked: Launch) -> Compiled | None:
    """Run it; what was compiled for it, which the interpreter has none of.

    Triton's own launch looks at every argument anew, which takes longer than many of these kernels. What it compiled is
    kept by what it looks at: names, constants, types, and whether pointers and sizes are multiples of 16 or 1. It keeps
    its kernel alive, whose identity is part of the key.
    """
    kernel, arguments, constants, tile = asked.kernel, asked.arguments, asked.constants, asked.tile
    first = next(iter(arguments.values()))
    device = (first.x if isinstance(first, Tiled) else first).get_device()
    if device >= 0 and device != torch.cuda.current_device():  # Triton starts kernels on the current one
        with torch.cuda.device(device):
            return start(asked)
    if _observer is not None:
        _observer(Started(kernel.__name__, constants))
    key: list[Any] = [id(kernel), device, tile.warps, tile.stages, tile.registers, *arguments, *constants]
    key += constants.values()
    values: list[Any] = []
    for x in arguments.values():
        if isinstance(x, Tiled):
            key += x.kind
            x = x.descriptor()
        elif isinstance(x, Tensor):
            key.append(x.dtype)
            x = x.data_ptr()  # as an integer: of a tensor, Triton asks the driver where it lies
            key.append(x & 15 == 0)
        elif isinstance(x, int):
            key.append((x & 15 == 0, x == 1, -(1 << 31) <= x < 1 << 31))
        values.append(x)
    known = tuple(key)
    kept = _compiled.get(known)
    if kept is not None:
        kept.runner(asked.grid)(*kept.ordered([*values, *constants.values()]))
        return kept
    described = {name: x.descriptor() if isinstance(x, Tiled) else x for name, x in arguments.items()}
    compiled = kernel[asked.grid](**described, **constants, **tile.options)
    if compiled is None:  # the interpreter has nothing to keep
        return None
    names = [*arguments, *constants]
    _compiled[known] = Compiled(compiled, tuple(names.index(name) for name in kernel.arg_names))
    return _compiled[known]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel, and where among arguments and constants those lie that it takes in turn."""

    kernel: Any
    order: tuple[int, ...]

    def runner(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What starts it: a function of all arguments and constants in its order, and of `stream`."""
        return self.kernel[(*grid, 1, 1)[:3]]

    def ordered(self, values: Sequence[Any]) -> list[Any]:
        """Values of arguments and constants, as a launch names them, in its order."""
        return [values[i] for i in self.order]


_compiled: dict[tuple[Any, ...], Compiled] = {}
