"""Launches are seen whoever makes them, and each has a stage."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from nsa_core.kernels._launch import Tile, launch
from nsa_core.kernels.stages import Started, observe, stage


class Kernel:
    """Stands for a Triton kernel: counts its runs."""

    __name__ = "_gate"

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
    assert seen == [Started("_gate", {"WAYS": 3})] * 2
    assert kernel.runs == 4


def _span(**constants: int) -> dict[str, int]:
    return {"BLOCK": 1, "STRIDE": 1, "WINDOW": 0, "M": 128} | constants


@pytest.mark.parametrize(
    ("kernel", "constants", "expected"),
    [
        ("_mean", {}, "compress"),
        ("_span_forward", _span(BLOCK=32, STRIDE=16), "compressed_attention"),
        ("_span_backward_q", _span(BLOCK=32, STRIDE=16), "compressed_attention_backward"),
        ("_span_forward", _span(WINDOW=512), "window"),
        ("_span_backward_kv", _span(WINDOW=512), "window_backward"),
        ("_span_forward", _span(), "causal"),
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
