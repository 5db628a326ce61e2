"""Launches are observed on every thread, and seen in a profile."""

from __future__ import annotations

from threading import Thread
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nsa_core.kernels.runtime.launch import Started, launch, observe
from nsa_core.kernels.runtime.tiles import Tile


class Kernel:
    """Stand-in for a Triton kernel: counts its runs."""

    __name__ = "_merge"

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**given: object) -> None:
            self.runs += 1

        return run


def _launch(kernel: Kernel, grid: tuple[int, ...] = (1,)) -> None:
    launch(kernel, grid, {"X": torch.zeros(1)}, {"WAYS": 3}, Tile(), stage="merge")


def test_launches_are_made_and_seen_from_every_thread_while_somebody_asks() -> None:
    kernel = Kernel()
    _launch(kernel)
    with observe() as seen:
        _launch(kernel)
        thread = Thread(target=_launch, args=(kernel,))
        thread.start()
        thread.join()
        _launch(kernel, (0,))  # an empty grid runs nothing
    _launch(kernel)
    assert seen == [Started("_merge", "merge", {"WAYS": 3})] * 2
    assert kernel.runs == 4


def test_a_range_of_a_stage_is_an_operation_as_a_kernel_on_a_gpu_needs_it() -> None:
    """The profiler gives a kernel to the innermost operation: an annotation in autograd's function would get none."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watch:
        _launch(Kernel())
    (found,) = [event for event in watch.events() or () if event.name == "nsa_core.merge"]
    assert not found.is_user_annotation
