"""Looks of series, fixed by the name."""

from __future__ import annotations

from orchestrator.report.series import LOOKS, OTHER_COLORS, look


def test_a_variant_looks_like_the_longest_name_that_it_begins_with():
    assert look("dense, flash-attn-4 4.0.0b36") == LOOKS["dense, flash-attn-4"]
    assert look("nsa-vibe (cmp)") == LOOKS["nsa-vibe"]
    assert look("dense-other").color in OTHER_COLORS
