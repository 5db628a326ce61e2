"""Looks of series: fixed by the name, and told apart without colour."""

from __future__ import annotations

from orchestrator.report.series import DASHES, LOOKS, OTHER_COLORS, dashes, look


def test_a_variant_looks_like_the_longest_name_that_it_begins_with():
    assert look("dense, flash-attn-4 4.0.0b36") == LOOKS["dense, flash-attn-4"]
    assert look("nsa-vibe (cmp)") == LOOKS["nsa-vibe"]
    assert look("dense-other").color in OTHER_COLORS


def test_series_of_one_implementation_differ_in_their_dashes():
    rows = [{"implementation": "dense", "origin": origin} for origin in ("measured",) * 3 + ("reported",) * 3]
    found = dashes([*rows, {"implementation": "naive", "origin": "measured"}])
    assert found == [*list(DASHES)[:3], *list(DASHES)[1:], next(iter(DASHES))]
