"""A forward and backward pass watched layer by layer.

Each layer is reported before it begins, and on a GPU only once the device has finished the one before, so that a hang
is in the layer that was reported last. Memory is noted there, and gradients that are missing or not finite are told by
the first layer, in the order of the backward pass, that has one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jobs.measure.clock import synchronize
from jobs.measure.memory import resident_bytes
from jobs.schema.point import Beat

LAYERS, STATS = "layers.json", "memory_stats.json"
"""Files of a watched pass: its marks; the CUDA allocator's statistics at the last of them."""

_MIB = 2**20


class BrokenGradient(Exception):  # noqa: N818 - the state it leads to is "error"; the name says which
    """A layer has no gradient, or one that is not finite."""


class PassFailed(Exception):  # noqa: N818 - as above
    """The pass raised at a place."""


@dataclass(frozen=True)
class Mark:
    """A place of the pass that was reached.

    Attributes:
        place: "forward of layer 2", "backward of layer 2".
        seconds: since the pass began.
        allocated_mib, reserved_mib: memory of the CUDA allocator; None on a CPU.
        resident_mib: the process's resident set.
        finite: whether all values are finite that arrived there: the layer's input, or the gradient of its output.
    """

    place: str
    seconds: float
    allocated_mib: float | None
    reserved_mib: float | None
    resident_mib: float
    finite: bool


class LayerWatch:
    """Watches one pass of layers that follow each other.

    Args:
        layers: the layers, first to last; told as layer 1, 2, ...
        device: the device that computes them.
        beat: gets each place when it is reached.
        folder: for files that outlive a pass that never ends; made if it is missing.
        hang_in: number of a layer whose backward pass shall never end, for a drill; None: none.
    """

    def __init__(
        self, layers: Sequence[nn.Module], device: torch.device, beat: Beat, folder: Path, hang_in: int | None = None
    ) -> None:
        self._layers, self._device, self._beat = layers, device, beat
        self._folder, self._hang_in = folder, hang_in
        self._marks: list[Mark] = []
        self._back = False  # whether the backward pass has begun
        self._start = 0.0

    def run(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> dict[str, str]:
        """Run the pass once; returns its marks and the memory around the backward pass, as files by name.

        Raises:
            BrokenGradient: a gradient is missing or not finite, or the loss is not.
            PassFailed: the pass raised; the message begins with the place that was reached last.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start = time.perf_counter()
        with ExitStack() as hooks:
            for number, layer in enumerate(self._layers, 1):
                hooks.enter_context(layer.register_forward_pre_hook(self._entering(number)))
                hooks.enter_context(layer.register_forward_hook(self._leaving(number)))
            try:
                loss = forward()
                self._reach("backward of the loss", 0, loss)
                before = memory_report(self._device)
                self._back = self._marks[-1].finite
                if self._back:
                    backward(loss)
                    self._reach("end of the backward pass", len(self._layers))
            except (RuntimeError, MemoryError) as err:
                place = self._marks[-1].place if self._marks else "start of the forward pass"
                raise PassFailed(f"{place}: {type(err).__name__}: {err}") from err
        if not self._back:
            place = next(mark.place for mark in self._marks if not mark.finite)
            raise BrokenGradient(f"the loss is {loss.item()}; values are not finite from here on: {place}")
        self._check()
        after = memory_report(self._device)
        return {LAYERS: self._marks_text(), "memory_before.txt": before, "memory_after.txt": after}

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if self._back:
                self._reach(f"recomputation of layer {number}", len(self._layers) - number, args[0])
                return
            self._reach(f"forward of layer {number}", number - 1, args[0])
            if number == 1 and args[0].requires_grad:
                args[0].register_hook(lambda grad: self._reach("backward of the embedding", len(self._layers), grad))

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
            if not self._back and out.requires_grad:
                out.register_hook(lambda grad: self._arrive(number, grad))

        return hook

    def _arrive(self, number: int, grad: Tensor) -> None:
        """The gradient of a layer's output is there: its backward pass begins."""
        self._reach(f"backward of layer {number}", len(self._layers) - number, grad)
        while number == self._hang_in:
            time.sleep(3600)

    def _reach(self, place: str, done: int, arrived: Tensor | None = None) -> None:
        synchronize(self._device)
        self._beat(place, done, len(self._layers))
        finite = arrived is None or bool(arrived.detach().isfinite().all())
        on_gpu = self._device.type == "cuda"
        allocated = torch.cuda.memory_allocated(self._device) / _MIB if on_gpu else None
        reserved = torch.cuda.memory_reserved(self._device) / _MIB if on_gpu else None
        seconds, resident = time.perf_counter() - self._start, resident_bytes() / _MIB
        self._marks.append(Mark(place, seconds, allocated, reserved, resident, finite))
        (self._folder / LAYERS).write_text(self._marks_text())
        if on_gpu:
            (self._folder / STATS).write_text(json.dumps(torch.cuda.memory_stats(self._device), indent=1))

    def _marks_text(self) -> str:
        return "[\n" + ",\n".join(json.dumps(asdict(mark)) for mark in self._marks) + "\n]\n"

    def _check(self) -> None:
        """Raise BrokenGradient for the first layer, in the order of the backward pass, without a good gradient."""
        reached = {mark.place: mark.finite for mark in self._marks}
        count = len(self._layers)
        for number in range(count, 0, -1):
            name = f"layer {number} of {count}"
            if (finite := reached.get(f"backward of layer {number}")) is None:
                raise BrokenGradient(f"{name} is the first without a gradient: none reaches its output")
            if not finite:
                source = "the loss" if number == count else f"the backward pass of layer {number + 1}"
                raise BrokenGradient(f"{name} is the first with a gradient that is not finite; it comes from {source}")
            for parameter, weight in self._layers[number - 1].named_parameters():
                if not weight.requires_grad:
                    continue
                if (gradient := weight.grad) is None:
                    raise BrokenGradient(f"{name} is the first without a gradient: {parameter} has none")
                if not gradient.isfinite().all():
                    raise BrokenGradient(f"{name} is the first with a gradient that is not finite: that of {parameter}")


def memory_report(device: torch.device) -> str:
    """The CUDA allocator's summary; on a CPU the process's memory as the kernel tells it."""
    if device.type == "cuda":
        return torch.cuda.memory_summary(device)
    status = Path("/proc/self/status").read_text()
    return "".join(line for line in status.splitlines(keepends=True) if line.startswith("Vm"))
