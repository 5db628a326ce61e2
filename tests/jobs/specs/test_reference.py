"""The page of all fields follows the kinds' specs, and their JSON schemas hold what they hold."""

from __future__ import annotations

import json
from pathlib import Path

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
