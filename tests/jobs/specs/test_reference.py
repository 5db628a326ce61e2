"""The page of all fields follows the kinds' specs, and their JSON schemas hold what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_a_schema_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands.schema("train")
    assert '"kv_heads"' in capsys.readouterr().out
