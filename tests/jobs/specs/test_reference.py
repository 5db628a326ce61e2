"""The pages of all fields and metrics follow the kinds' specs and quantities, and JSON schemas hold what specs hold."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import yaml

from jobs.specs import reference
from jobs.specs.kinds import kinds
from orchestrator.cli import commands


def test_the_page_lists_every_field_of_every_kind() -> None:
    written = Path("docs/specs.md").read_text()
    assert written.partition(reference.MARK)[2] == f"\n\n{reference.page()}", "make specs"
    for name, module in kinds().items():
        table = written.partition(f"## kind: {name}\n")[2].partition("\n## ")[0]
        common = written.partition("## Fields of every kind\n")[2].partition("\n## ")[0]
        missing = [field for field in module.Spec.model_fields if f"| {field} |" not in table + common + "| kind |"]
        assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize("kind", kinds())
def test_the_schema_that_is_printed_knows_the_ready_specs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands.schema(kind)
    schema = json.loads(capsys.readouterr().out)
    for spec in map(yaml.safe_load, [path.read_text() for path in Path("jobs/configs").glob("*.yaml")]):
        if spec["kind"] == kind:
            jsonschema.validate(spec | {"env": {"TORCH_LOGS": "x"}, "python": None}, schema)
            with pytest.raises(jsonschema.ValidationError, match="lenght"):
                jsonschema.validate(spec | {"lenght": 1}, schema)


PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
OWN_KINDS = {name: module for name, module in kinds().items() if module.__name__.startswith("jobs.")}
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
            found = {name for name in OWN_KINDS if name in words}
            found |= set[str]().union(*(own for group, own in GROUPS.items() if group in words))
            found = set(OWN_KINDS) - found if words[:2] == ["all", "but"] or words[0] == "any" else found
            yield Row(re.findall(r"`([^`]+)`", cells[0]), cells[1].replace("°", "").split(", "), found)


@pytest.mark.parametrize("kind", sorted(OWN_KINDS))
def test_a_kinds_rows_are_those_of_its_quantities(kind: str) -> None:
    page, own = [row for row in _rows() if kind in row.kinds], OWN_KINDS[kind].QUANTITIES
    for quantity in own:
        rows = [row for row in page if any(fnmatchcase(quantity.name, name) for name in row.names)]
        assert any(quantity.unit in row.units for row in rows), f"docs/metrics.md: no row for {quantity.name} of {kind}"
    for name in (name for row in page for name in row.names):
        assert any(fnmatchcase(quantity.name, name) for quantity in own), f"docs/metrics.md: {kind} has no {name}"


def test_every_row_is_of_a_kind() -> None:
    assert all(row.kinds for row in _rows())
    assert len(list(_rows())) > 30
