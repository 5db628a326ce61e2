"""Which stage of the operator a kernel works for, so that time can be told by stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .runtime.launch import Started, observe

__all__ = ["Started", "observe", "stage"]

# Stages of the backward end in "_backward"; "_q" and "_kv" say towards what.
_STAGES = {
    "_mean": "compress",
    "_importance": "scores",
    "_choose": "topk",
    "_sort_keys": "inverse_index",
    "_count": "inverse_index",
    "_assign": "inverse_index",
    "_all_spans_forward": "compressed_window_forced",
    "_all_spans_backward_q": "compressed_window_forced_backward_q",
    "_selected_forward": "selected",
    "_selected_forward_hopper": "selected",
    "_merge": "merge",
    "_prepare": "gates_backward",
    "_selected_backward": "selected_backward",
    "_selected_backward_hopper": "selected_backward",
    "_sum_items": "sum_items_backward",
    "_sum_chunks": "sum_chunks_backward",
    "_sum_dq": "merge_backward",
    "_spread": "compress_backward",
}


# A span kernel works for the branches that are on; with none on for the initial blocks, far behind the queries.
_BRANCHES = {"CMP": "compressed", "WIN": "window", "SLC": "forced"}


def stage(kernel: str, constants: Mapping[str, Any]) -> str:
    """The stage that a launch belongs to; a kernel that is not listed is a stage of its own, under its own name.

    Args:
        kernel: its name, as in `Started`.
        constants: its compile-time constants: what a span kernel works for is told by them.
    """
    if kernel.startswith("_span_") and (branches := _branches(constants)):
        return branches + kernel.removeprefix("_span").removesuffix("_forward")
    return _STAGES.get(kernel, kernel.lstrip("_"))


def _branches(constants: Mapping[str, Any]) -> str:
    """Those of a span kernel; forced are the blocks that every query selects, or all where there is no choice."""
    if not constants.keys() >= _BRANCHES.keys():
        return ""
    return "_".join(name for branch, name in _BRANCHES.items() if constants[branch]) or "forced"
