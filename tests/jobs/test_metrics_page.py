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


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            yield Row(re.findall(r"`([^`]+)`", cells[0]), cells[1].replace("°", "").split(", "), named(cells[2]))


def named(cell: str) -> set[str]:
    """Kinds in a cell of the page: "train, soak on CUDA", "trainings", "all but drill", "any on CUDA"."""
    words = re.findall(r"\w+", cell)
    found = {name for name in KINDS if name in words}.union(*(own for group, own in GROUPS.items() if group in words))
    if words[0] == "any":
        return set(KINDS)
    return set(KINDS) - found if words[:2] == ["all", "but"] else found


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_quantity_of_a_kind_has_a_row(kind: str) -> None:
    page = [row for row in rows() if kind in row.kinds]
    lacking = [
        f"{quantity.name} [{quantity.unit}]"
        for quantity in KINDS[kind].QUANTITIES
        if not any(
            quantity.unit in row.units and any(fnmatchcase(quantity.name, name) for name in row.names) for row in page
        )
    ]
    assert not lacking, f"docs/metrics.md: no row of kind {kind} for {', '.join(lacking)}"


def test_every_row_is_of_quantities_that_its_kinds_have() -> None:
    page = list(rows())
    assert len(page) > 30
    for row in page:
        assert row.kinds, row.names
        for kind in row.kinds:
            own = [quantity.name for quantity in KINDS[kind].QUANTITIES]
            unknown = [name for name in row.names if not any(fnmatchcase(each, name) for each in own)]
            assert not unknown, f"docs/metrics.md: kind {kind} has no {', '.join(unknown)}"
