"""Replay of a function of tensors without its Python: host time for short sequences.

Where sequences are short the host takes longer than the device, most of it for what follows from shapes alone and is
the same every time: tiles, grids, constants, the compiled kernel, sizes of allocations. The second call with tensors of
given shapes is captured as a list of steps, as a CUDA graph captures it, and later calls replay the steps. The first is
not, because a capture takes longer than a call, and shapes may never come back. Unlike in a graph, memory is allocated
anew, so that results stay as they are when the function runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...routes import profiled_stage
from .launch import Launch, handed_to, is_watched, start
from .tma import Tiled, placed

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
    device = next(x.device for x in tensors if x is not None)
    if is_watched() or device.type == "meta":
        return function(settings, *tensors)
    like = tuple(None if x is None else (x.shape, x.dtype, x.data_ptr() % 16) for x in tensors)
    known = kept(function, settings, device, like)
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()  # kernels start on the current
    with torch.cuda.device(device) if elsewhere else nullcontext(), torch.no_grad():
        if known.replay is not None:
            return known.replay(tensors, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        if known.has_run:
            given = [None if x is None else x.detach() for x in tensors]  # distinct objects, even of one tensor
            recorder = _Recorder(given)
            with recorder, handed_to(recorder.started):
                results = function(settings, *given)
            known.replay = recorder.captured(len(given), results)
            return results
        results, known.has_run = function(settings, *tensors), True
        return results


@lru_cache(maxsize=_KEPT)
def kept(function: Function, settings: Hashable, device: torch.device, like: tuple[Any, ...]) -> SimpleNamespace:
    """State of one function, settings and kind of tensors; tests clear the cache where they change what follows."""
    return SimpleNamespace(has_run=False, replay=None)


@dataclass(slots=True)
class _Memory:
    """The tensors of one replay and their addresses: a slot's tensor owns its memory, or was given."""

    tensors: list[Any]
    addresses: list[int]
    stream: int


@dataclass(frozen=True, slots=True)
class _View:
    """A slot's tensor, or a part of it that starts `offset` elements, or `bytes` bytes, behind its start.

    Attributes:
        descriptor: of a kernel's argument that is read by tiles.
    """

    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    bytes: int = 0
    is_all: bool = True
    descriptor: Any = None

    def of(self, memory: _Memory) -> Tensor:
        x = memory.tensors[self.slot]
        return x if self.is_all else x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


_Step = Callable[[_Memory], None]


class _Recorder(TorchDispatchMode):
    """Captures a function as it runs: PyTorch's operators below autograd, and launches. Keeps no tensor alive."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._steps: list[tuple[_Step, set[int]]] = []  # and the slots that each reads or writes
        self._views = WeakTensorKeyDictionary()
        self._slots = len(given)
        self._starting = False
        for slot, x in enumerate(given):
            if x is not None:
                self._views[x] = _View(slot, tuple(x.shape), x.stride())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._starting:  # an operator that the interpreter calls
            return result
        results = result if isinstance(result, list | tuple) else [result]
        assert all(isinstance(x, Tensor) for x in results), "a value that waits for the device"
        assert not any(isinstance(x, Tensor) for x in kwargs.values()), "a tensor by name"
        known = [] if func in _EMPTY else [x for x in args if isinstance(x, Tensor)]
        slots = [self._slot(x, known) for x in results]
        made = {slot for slot in slots if slot is not None}
        if func in _EMPTY:
            self._steps.append((_allocation(result, *made), made))
        elif made or func._schema.is_mutable:
            used = {self._views[x].slot for x in known} | made
            self._steps.append((_operation(func, [self._viewed(x) for x in args], kwargs, slots), used))
        return result

    def started(self, asked: Launch) -> None:
        """Run a launch and capture it."""
        self._starting = True
        compiled = start(asked)
        self._starting = False
        arguments = {name: self._viewed(x) for name, x in asked.arguments.items()}
        used = {x.slot for x in arguments.values() if isinstance(x, _View)}
        if compiled is None:
            step = _interpretation(replace(asked, arguments=arguments))
        else:
            kernel, ordered = compiled
            values = list(ordered([*arguments.values(), *asked.constants.values()]))
            step = _start(kernel[(*asked.grid, 1, 1)[:3]], values, asked.stage)
        self._steps.append((step, used))

    def captured(self, given: int, results: Sequence[Tensor]) -> Callable[[Sequence[Tensor | None], int], list[Tensor]]:
        """A function that replays the steps: of as many tensors as were `given`, on a stream, to the same results."""
        views: list[_View] = [self._views[x] for x in results]
        needed, backwards = {view.slot for view in views} | set(range(given)), []
        for step, slots in reversed(self._steps):
            backwards.append((step, tuple(slots - needed)))  # tensors that no later step needs
            needed |= slots
        steps, empty = backwards[::-1], [None] * (self._slots - given)

        def replay(tensors: Sequence[Tensor | None], stream: int) -> list[Tensor]:
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
            memory = _Memory([*tensors, *empty], addresses + [0] * len(empty), stream)
            for step, done in steps:
                step(memory)
                for slot in done:
                    memory.tensors[slot] = None
            return [view.of(memory) for view in views]

        return replay

    def _slot(self, x: Tensor, given: Sequence[Tensor]) -> int | None:
        """A new slot for x, or None if x is one of `given` or a part of one."""
        for source in given:
            if x is source:
                return None
            if x.untyped_storage()._cdata == source.untyped_storage()._cdata:
                assert x.dtype == source.dtype, "a view in another dtype cannot be replayed"
                of: _View = self._views[source]
                offset = of.offset + x.storage_offset() - source.storage_offset()
                is_all = of.is_all and x.shape == source.shape and x.stride() == source.stride()
                self._views[x] = _View(of.slot, tuple(x.shape), x.stride(), offset, offset * x.itemsize, is_all)
                return None
        slot, self._slots = self._slots, self._slots + 1
        self._views[x] = _View(slot, tuple(x.shape), x.stride())
        return slot

    def _viewed(self, x: object) -> object:
        """Replace tensors by slot views, and raise KeyError for one from elsewhere; pass other values through."""
        assert not isinstance(x, list | tuple) or not any(isinstance(y, Tensor) for y in x), "tensors in a list"
        if isinstance(x, Tiled):
            return replace(self._views[x.x], descriptor=placed(x.descriptor(), 0))
        return self._views[x] if isinstance(x, Tensor) else x


def _allocation(x: Tensor, slot: int) -> _Step:
    """An allocation of a tensor like x."""
    size, stride, dtype, device = tuple(x.shape), x.stride(), x.dtype, x.device

    def step(memory: _Memory) -> None:
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        memory.tensors[slot], memory.addresses[slot] = made, made.data_ptr()

    return step


def _operation(
    operator: Callable[..., Any], args: list[object], kwargs: dict[str, Any], slots: list[int | None]
) -> _Step:
    """A call of a PyTorch operator; `slots`: for each result that owns its memory its slot, else None."""

    def step(memory: _Memory) -> None:
        result = operator(*[x.of(memory) if isinstance(x, _View) else x for x in args], **kwargs)
        results = result if isinstance(result, list | tuple) else [result]
        for slot, x in zip(slots, results, strict=True):
            if slot is not None:
                memory.tensors[slot], memory.addresses[slot] = x, x.data_ptr()

    return step


def _start(runner: Callable[..., None], values: list[Any], stage: str) -> _Step:
    """A compiled kernel's launch: `runner` starts it, with `values` for its parameters, views in place of addresses."""
    views = [(place, x) for place, x in enumerate(values) if isinstance(x, _View)]
    pointers = [(place, x.slot, x.bytes) for place, x in views if x.descriptor is None]
    tiled = [(place, x.slot, x.bytes, x.descriptor) for place, x in views if x.descriptor is not None]

    def step(memory: _Memory) -> None:
        parameters, addresses = values.copy(), memory.addresses
        for place, slot, offset in pointers:
            parameters[place] = addresses[slot] + offset
        for place, slot, offset, descriptor in tiled:
            parameters[place] = placed(descriptor, addresses[slot] + offset)
        if profiler._is_profiler_enabled:
            with profiled_stage(stage):
                runner(*parameters, stream=memory.stream)
        else:
            runner(*parameters, stream=memory.stream)

    return step


def _interpretation(asked: Launch) -> _Step:
    """A launch in the interpreter, which takes tensors instead of addresses."""

    def step(memory: _Memory) -> None:
        given = {name: x.of(memory) if isinstance(x, _View) else x for name, x in asked.arguments.items()}
        start(replace(asked, arguments=given))

    return step
