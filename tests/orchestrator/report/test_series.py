"""Looks of series: fixed by the name, told apart on both grounds, by the colour-blind and without colour."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from orchestrator.report.series import DASHES, GREY, LOOKS, OTHER_COLORS, dashes, look

OWN = ("triton", "chunked", "naive", "dense", "reference", "nsa-vibe")
LIGHT, DARK = "#ffffff", "#11161d"
# Linear RGB as a dichromat sees it (Machado, Oliveira and Fernandes, 2009, severity 1).
VISIONS = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color: str) -> np.ndarray:
    """Linear RGB, 0 to 1."""
    channels = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2, 1 to 21."""
    low, high = sorted(float(TO_XYZ[1] @ linear(color)) + 0.05 for color in (one, other))
    return high / low


def distance(one: str, other: str, vision: str) -> float:
    """Distance in CIELAB (CIE 1976) as the vision sees it; 2 is just visible."""
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


def lab(color: str, vision: str) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(np.array(VISIONS[vision]) @ linear(color), 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_can_be_told_apart(vision: str):
    own = [LOOKS[name].color for name in OWN]
    assert min(distance(one, other, vision) for one, other in combinations(own, 2)) > 20
    every = {look.color for look in LOOKS.values()} | set(OTHER_COLORS)
    assert min(distance(color, GREY, vision) for color in every) > 8  # guides, which are dotted and without marks
    assert min(distance(one, other, vision) for one, other in combinations(sorted(every), 2)) > 10


@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_colours_stand_out_from_both_grounds(ground: str):
    colors = {look.color for look in LOOKS.values()} | set(OTHER_COLORS)
    assert min(contrast(color, ground) for color in colors) > 2.2


def test_a_variant_looks_like_the_longest_name_that_it_begins_with():
    assert look("dense, flash-attn-4 4.0.0b36") == LOOKS["dense, flash-attn-4"]
    assert look("nsa-vibe (cmp)") == LOOKS["nsa-vibe"]
    assert look("dense-other").color in OTHER_COLORS


def test_series_of_one_implementation_differ_in_their_dashes():
    rows = [{"implementation": "dense", "origin": origin} for origin in ("measured",) * 3 + ("reported",) * 3]
    found = dashes([*rows, {"implementation": "naive", "origin": "measured"}])
    assert found == [*list(DASHES)[:3], *list(DASHES)[1:], next(iter(DASHES))]
