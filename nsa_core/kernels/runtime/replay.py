"""Replay of a function of tensors without its Python: host time for short sequences.

Where sequences are short the host takes longer than the device, most of it for what follows from shapes alone and is
the same every time: tiles, grids, constants, the compiled kernel, sizes of allocations. The second call with tensors of
given shapes is captured as a list of steps, as a CUDA graph captures it, and later calls replay the steps. The first is
not, because a capture takes longer than a call, and shapes may never come back. Unlike in a graph, memory is allocated
anew, so that results stay as they are when the function runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...routes import profiled_stage
from .launch import Compiled, Launch, handed_to, is_watched, start
from .tma import Tiled, placed

__all__ = ["forget", "run"]

# Takes settings and tensors, which it only reads. What it does follows from the settings and from the tensors' shapes,
# dtypes and device: it waits for no value, and calls no operator that autocast changes.
Function = Callable[..., list[Tensor]]

_KEPT = 256  # captures; one takes the memory of a few hundred small Python objects
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default)


def run(function: Function, settings: Hashable, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """function(settings, *tensors); from the third call with equal settings and alike tensors on by replay.

    Runs below autograd: no gradient flows through it.

    Args:
        tensors: contiguous, on one device; alike if their shapes, dtypes and addresses modulo 16 are the same.
    """
    if is_watched():
        return function(settings, *tensors)
    device = next(x.device for x in tensors if x is not None)
    like = tuple(None if x is None else (x.shape, x.dtype, x.data_ptr() % 16) for x in tensors)
    kept = _kept(function, settings, device, like)
    with _current(device), torch.no_grad():
        if kept.capture is not None:
            return kept.capture.replay(tensors, device)
        if kept.is_known:
            results, kept.capture = _captured(partial(function, settings), tensors)
            return results
        results, kept.is_known = function(settings, *tensors), True
        return results


def forget() -> None:
    """Drop all captures: for tests, which change what follows from shapes."""
    _kept.cache_clear()


@dataclass(slots=True)
class _Kept:
    """The capture for one function, settings and kind of tensors; None before the second call."""

    is_known: bool = False
    capture: _Capture | None = None


@lru_cache(maxsize=_KEPT)
def _kept(function: Function, settings: Hashable, device: torch.device, like: tuple[Any, ...]) -> _Kept:
    return _Kept()


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Context in which `device` is the current one, on which kernels are started."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


class _Memory:
    """The tensors of one replay: each slot holds one that owns its memory, or one that was given."""

    __slots__ = ("addresses", "stream", "tensors")

    def __init__(self, slots: int, given: Sequence[Tensor | None], stream: int) -> None:
        self.tensors: list[Tensor | None] = [*given, *[None] * (slots - len(given))]
        self.addresses = [0 if x is None else x.data_ptr() for x in self.tensors]
        self.stream = stream

    def put(self, slot: int, x: Tensor) -> None:
        self.tensors[slot], self.addresses[slot] = x, x.data_ptr()


@dataclass(frozen=True, slots=True)
class _View:
    """A slot's tensor, or a part of it that starts `offset` elements, or `bytes` bytes, behind its start."""

    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int
    is_all: bool

    def of(self, memory: _Memory) -> Tensor:
        x = memory.tensors[self.slot]
        assert x is not None, "freed before its last use"
        return x if self.is_all else x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class _TiledView:
    """A view read by tiles: a kernel's `Tiled` argument."""

    view: _View
    descriptor: Any


@dataclass(frozen=True, slots=True)
class _Allocation:
    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, memory: _Memory) -> None:
        x = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        memory.put(self.slot, x)


@dataclass(frozen=True, slots=True)
class _Operator:
    """A call of a PyTorch operator; `slots`: for each result that owns its memory its slot, else None."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: tuple[int | None, ...]

    def __call__(self, memory: _Memory) -> None:
        args = [x.of(memory) if isinstance(x, _View) else x for x in self.args]
        for slot, x in zip(self.slots, _tensors(self.operator(*args, **self.kwargs)), strict=True):
            if slot is not None:
                memory.put(slot, x)


@dataclass(frozen=True, slots=True)
class _Start:
    """A compiled kernel's launch.

    Attributes:
        runner: starts the kernel.
        values: its parameters, but for addresses.
        pointers: parameters that are addresses: (index in values, slot, bytes from the slot's start).
        tiled: parameters that are tensor descriptors: the same of the memory that they describe.
        stage: the operator's stage, which names its range in a profile.
    """

    runner: Callable[..., None]
    values: list[Any]
    pointers: tuple[tuple[int, int, int], ...]
    tiled: tuple[tuple[int, int, int], ...]
    stage: str

    def __call__(self, memory: _Memory) -> None:
        values, addresses = self.values.copy(), memory.addresses
        for place, slot, offset in self.pointers:
            values[place] = addresses[slot] + offset
        for place, slot, offset in self.tiled:
            values[place] = placed(values[place], addresses[slot] + offset)
        if profiler._is_profiler_enabled:
            with profiled_stage(self.stage):
                self.runner(*values, stream=memory.stream)
        else:
            self.runner(*values, stream=memory.stream)


@dataclass(frozen=True, slots=True)
class _Interpret:
    """A launch in the interpreter, which takes tensors instead of addresses."""

    asked: Launch

    def __call__(self, memory: _Memory) -> None:
        given = self.asked.arguments
        assert not any(isinstance(x, _TiledView) for x in given.values()), "no interpreter for these"
        start(replace(self.asked, arguments={k: x.of(memory) if isinstance(x, _View) else x for k, x in given.items()}))


_Step = _Allocation | _Operator | _Start | _Interpret


@dataclass(frozen=True, slots=True)
class _Capture:
    """Steps, each with the slots that no later step needs; the number of slots; the results."""

    steps: list[tuple[_Step, tuple[int, ...]]]
    slots: int
    results: list[_View]

    def replay(self, given: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        memory = _Memory(self.slots, given, stream)
        for step, done in self.steps:
            step(memory)
            for slot in done:
                memory.tensors[slot] = None
        return [view.of(memory) for view in self.results]


def _captured(function: Callable[..., list[Tensor]], tensors: Sequence[Tensor | None]) -> tuple[list[Tensor], _Capture]:
    given = [None if x is None else x.detach() for x in tensors]  # distinct objects, even of one tensor
    recorder = _Recorder(given)
    with recorder, handed_to(recorder.started):
        results = function(*given)
    return results, recorder.capture(results)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A captured step and the slots that it reads or writes."""

    step: _Step
    slots: set[int]


class _Recorder(TorchDispatchMode):
    """Captures a function as it runs: PyTorch's operators below autograd, and launches. Keeps no tensor alive."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._taken: list[_Taken] = []
        self._views = WeakTensorKeyDictionary()
        self._next = count()
        self._given = len(given)
        self._starting = False
        for x in given:
            slot = next(self._next)
            if x is not None:
                self._own(x, slot)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if self._starting:  # an operator that the interpreter calls
            return result
        assert not any(isinstance(x, Tensor) for x in (kwargs or {}).values()), "a tensor by name"
        if func in _EMPTY:
            slot = next(self._next)
            self._own(result, slot)
            step = _Allocation(slot, tuple(result.shape), result.stride(), result.dtype, result.device)
            self._taken.append(_Taken(step, {slot}))
            return result
        known = [x for x in args if isinstance(x, Tensor)]
        results = _tensors(result)
        slots = tuple(self._slot(x, known) for x in results)
        if not all(slot is None for slot in slots) or func._schema.is_mutable:
            step = _Operator(func, tuple(map(self._viewed, args)), kwargs or {}, slots)
            used = {self._views[x].slot for x in known} | {slot for slot in slots if slot is not None}
            self._taken.append(_Taken(step, used))
        return result

    def started(self, asked: Launch) -> None:
        """Run a launch and capture it."""
        self._starting = True
        compiled = start(asked)
        self._starting = False
        arguments = {name: self._viewed(x) for name, x in asked.arguments.items()}
        views = (x.view if isinstance(x, _TiledView) else x for x in arguments.values())
        used = {x.slot for x in views if isinstance(x, _View)}
        self._taken.append(_Taken(_step(asked, arguments, compiled), used))

    def capture(self, results: Sequence[Tensor]) -> _Capture:
        views: list[_View] = [self._views[x] for x in results]
        needed = {view.slot for view in views} | set(range(self._given))
        steps: list[tuple[_Step, tuple[int, ...]]] = []
        for taken in reversed(self._taken):
            steps.append((taken.step, tuple(taken.slots - needed)))
            needed |= taken.slots
        return _Capture(steps[::-1], next(self._next), views)

    def _slot(self, x: Tensor, given: Sequence[Tensor]) -> int | None:
        """A new slot for x, or None if x is one of `given` or a part of one."""
        for source in given:
            if x is source:
                return None
            if x.untyped_storage()._cdata == source.untyped_storage()._cdata:
                self._views[x] = self._part(x, source)
                return None
        slot = next(self._next)
        self._own(x, slot)
        return slot

    def _own(self, x: Tensor, slot: int) -> None:
        self._views[x] = _View(slot, tuple(x.shape), x.stride(), 0, 0, is_all=True)

    def _part(self, x: Tensor, source: Tensor) -> _View:
        assert x.dtype == source.dtype, "a view in another dtype cannot be replayed"
        of: _View = self._views[source]
        offset = of.offset + x.storage_offset() - source.storage_offset()
        is_all = of.is_all and x.shape == source.shape and x.stride() == source.stride()
        return _View(of.slot, tuple(x.shape), x.stride(), offset, offset * x.itemsize, is_all)

    def _viewed(self, x: object) -> object:
        """Replace tensors by slot views; pass other values through."""
        assert not isinstance(x, list | tuple) or not any(isinstance(y, Tensor) for y in x), "tensors in a list"
        assert not isinstance(x, Tensor) or x in self._views, "a tensor from elsewhere"
        if isinstance(x, Tiled):
            return _TiledView(self._views[x.x], placed(x.descriptor(), 0))
        return self._views[x] if isinstance(x, Tensor) else x


def _step(asked: Launch, arguments: dict[str, Any], compiled: Compiled | None) -> _Step:
    if compiled is None:
        return _Interpret(replace(asked, arguments=arguments))
    values = compiled.ordered([*arguments.values(), *asked.constants.values()])
    pointers = tuple((place, x.slot, x.bytes) for place, x in enumerate(values) if isinstance(x, _View))
    tiled = [(place, x) for place, x in enumerate(values) if isinstance(x, _TiledView)]
    at = tuple((place, x.view.slot, x.view.bytes) for place, x in tiled)
    kept = [0 if isinstance(x, _View) else x.descriptor if isinstance(x, _TiledView) else x for x in values]
    return _Start(compiled.runner(asked.grid), kept, pointers, at, asked.stage)


def _tensors(result: object) -> Iterator[Tensor]:
    """The tensors in an operator's result."""
    for x in result if isinstance(result, list | tuple) else (result,):
        assert isinstance(x, Tensor), "a value that waits for the device"
        yield x
