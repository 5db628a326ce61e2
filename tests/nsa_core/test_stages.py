"""Launches are seen whoever makes them, and each has a stage."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from nsa_core.kernels.runtime.launch import launch
from nsa_core.kernels.runtime.tiles import Tile
from nsa_core.kernels.stages import Started, observe, stage


class Kernel:
    """Stands for a Triton kernel: counts its runs."""

    __name__ = "_merge"

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**given: object) -> None:
            self.runs += 1

        return run


def _launch(kernel: Kernel, grid: tuple[int, ...] = (1,)) -> None:
    launch(kernel, grid, {"X": torch.zeros(1)}, {"WAYS": 3}, Tile())


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
    assert seen == [Started("_merge", {"WAYS": 3})] * 2
    assert kernel.runs == 4


def _on(**branches: bool) -> dict[str, Any]:
    return {"CMP": False, "WIN": False, "SLC": False, "BLOCK": 32, "STRIDE": 16} | branches


@pytest.mark.parametrize(
    ("kernel", "constants", "expected"),
    [
        ("_mean", {}, "compress"),
        ("_span_forward", _on(CMP=True, WIN=True, SLC=True), "compressed_window_forced"),
        ("_span_backward_q", _on(CMP=True, SLC=True), "compressed_forced_backward_q"),
        ("_span_forward", _on(CMP=True), "compressed"),
        ("_span_backward_kv", _on(CMP=True), "compressed_backward_kv"),
        ("_span_backward_kv", _on(WIN=True), "window_backward_kv"),
        ("_span_backward_kv", _on(SLC=True), "forced_backward_kv"),
        ("_span_backward_kv", _on(WIN=True, SLC=True), "window_forced_backward_kv"),
        ("_span_backward_kv", _on(), "forced_backward_kv"),  # the initial blocks, by the queries far behind them
        ("_span_forward", {"M": 64}, "span_forward"),
        ("_all_spans_forward", {"M": 128}, "compressed_window_forced"),
        ("_all_spans_backward_q", {"M": 128}, "compressed_window_forced_backward_q"),
        ("_selected_forward_hopper", {}, "selected"),
        ("_selected_backward_hopper", {}, "selected_backward"),
        ("_choose", {}, "topk"),
        ("_count", {}, "inverse_index"),
        ("_sum_dq", {}, "merge_backward"),
        ("_nobody_knows_it_forward", {"M": 64}, "nobody_knows_it_forward"),
    ],
)
def test_a_stage_is_told_by_kernel_and_constants_and_an_unknown_kernel_is_its_own(
    kernel: str, constants: dict[str, int], expected: str
) -> None:
    assert stage(kernel, constants) == expected
