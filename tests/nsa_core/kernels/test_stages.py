"""Launches are observed on every thread and seen in a profile, and each has a stage named as in metrics."""

from __future__ import annotations

from importlib.util import find_spec
from threading import Thread
from typing import Any

import pytest
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


EVERYWHERE = {
    ("_mean", "compress"),
    ("_spread", "compress_backward"),
    ("_span_forward", "compressed_window_forced"),
    ("_span_backward_q", "compressed_window_forced_backward_q"),
    ("_span_backward_kv", "compressed_backward_kv"),
    ("_span_backward_kv", "window_backward_kv"),
    ("_span_backward_kv", "forced_backward_kv"),
    ("_span_backward_kv", "window_forced_backward_kv"),
    ("_sum_chunks", "sum_chunks_backward"),
    ("_importance", "scores"),
    ("_choose", "topk"),
    ("_sort_keys", "inverse_index"),
    ("_count", "inverse_index"),
    ("_assign", "inverse_index"),
    ("_selected_forward", "selected"),
    ("_selected_backward", "selected_backward"),
    ("_sum_items", "sum_items_backward"),
    ("_merge", "merge"),
    ("_sum_dq", "merge_backward"),
    ("_prepare", "gates_backward"),
    ("_decode_take", "decode_take"),
    ("_decode_take_dense", "decode_take_dense"),
    ("_decode_compressed", "decode_compressed"),
    ("_decode_window", "decode_window"),
    ("_decode_selected", "decode_selected"),
    ("_decode_dense", "decode_dense"),
    ("_decode_merge", "decode_merge"),
    ("_heads", "heads"),
    ("_swiglu", "swiglu"),
    ("_swiglu_backward", "swiglu_backward"),
    ("_cross_entropy", "cross_entropy"),
}
ON_HOPPER = {
    ("_all_spans_forward", "compressed_window_forced"),
    ("_all_spans_backward_q", "compressed_window_forced_backward_q"),
    ("_selected_forward_hopper", "selected"),
    ("_selected_backward_hopper", "selected_backward"),
}
INSTEAD_OF = {("_selected_forward", "selected"), ("_selected_backward", "selected_backward")}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("arch", "expected"), [(80, EVERYWHERE), (90, EVERYWHERE - INSTEAD_OF | ON_HOPPER)])
def test_every_kernel_is_launched_for_its_stage(arch: int, expected: set[tuple[str, str]]) -> None:
    """With shared and separate keys, training and decoding; two kernels of a stage are one in what users see."""
    from nsa_core.kernels.aot import cases

    made = cases.launches(cases.CompileCase(8, 2, 128, 128, torch.bfloat16), arch)
    assert {(one.kernel.__name__, one.stage) for one in made} == expected
