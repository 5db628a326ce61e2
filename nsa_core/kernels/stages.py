"""Which stage of the operator a kernel works for, so that time can be told by stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._launch import Started, observe

__all__ = ["Started", "observe", "stage"]

# Stages of the backward end in "_backward".
_STAGES = {
    "_mean": "compress",
    "_importance": "scores",
    "_choose": "topk",
    "_sort_keys": "inverse_index",
    "_count": "inverse_index",
    "_assign": "inverse_index",
    "_selected_forward": "selected",
    "_merge": "merge",
    "_gate": "gates",
    "_prepare": "gates_backward",
    "_selected_backward": "selected_backward",
    "_sum_items": "sum_items_backward",
    "_sum_dq": "merge_backward",
    "_spread": "compress_backward",
}


def stage(kernel: str, constants: Mapping[str, Any]) -> str:
    """The stage that a launch belongs to; a kernel that is not listed is a stage of its own, under its own name.

    Args:
        kernel: its name, as in `Started`.
        constants: its compile-time constants: what a span kernel works for is told by them.
    """
    if kernel.startswith("_span_"):
        return _span(constants) + ("_backward" if "backward" in kernel else "")
    return _STAGES.get(kernel, kernel.lstrip("_"))


def _span(constants: Mapping[str, Any]) -> str:
    """The branch by its `ranges.Span`; "causal" are the queries that see every block: the selected branch's first."""
    if constants["BLOCK"] > 1 or constants["STRIDE"] > 1:
        return "compressed_attention"
    return "window" if constants["WINDOW"] > 0 else "causal"
