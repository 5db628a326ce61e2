"""docs/metrics.md has a row for every quantity of every kind of this repository, and for no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs.specs.kinds import kinds

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
KINDS = {name: module for name, module in kinds().items() if module.__name__.startswith("jobs.")}
GROUPS = {"trainings": {"train", "soak", "diagnose"}}


class Row(NamedTuple):
    names: list[str]
    units: list[str]
    kinds: set[str]


def _rows() -> Iterator[Row]:
    """Rows of the page; kinds are "train, soak on CUDA", "trainings", "all but drill" or "any on CUDA"."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            words = re.findall(r"\w+", cells[2])
            found = {name for name in KINDS if name in words}
            found |= set[str]().union(*(own for group, own in GROUPS.items() if group in words))
            found = set(KINDS) - found if words[:2] == ["all", "but"] or words[0] == "any" else found
            yield Row(re.findall(r"`([^`]+)`", cells[0]), cells[1].replace("°", "").split(", "), found)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_kinds_rows_are_those_of_its_quantities(kind: str) -> None:
    page, own = [row for row in _rows() if kind in row.kinds], KINDS[kind].QUANTITIES
    for quantity in own:
        rows = [row for row in page if any(fnmatchcase(quantity.name, name) for name in row.names)]
        assert any(quantity.unit in row.units for row in rows), f"docs/metrics.md: no row for {quantity.name} of {kind}"
    for name in (name for row in page for name in row.names):
        assert any(fnmatchcase(quantity.name, name) for quantity in own), f"docs/metrics.md: {kind} has no {name}"


def test_every_row_is_of_a_kind() -> None:
    assert all(row.kinds for row in _rows())
    assert len(list(_rows())) > 30
