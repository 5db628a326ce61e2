"""Specs that are too large, or hold what no value is: refused in few lines, each with its own fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError
from orchestrator.terminal import complain


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"name: {'x' * 2_000_000}", r"spec: '.*spec.yaml' has more than 1,048,576 characters; shorten its texts"),
        ("a: " + "[" * 3000 + "]" * 3000, r"spec: .* is nested too deep; write fewer brackets within each other"),
        ("a: &a [x]\nb: &b [*a, *a]", r"spec: .* has an alias, \*a, within what another stands for; write it out"),
        (f"seed: {'9' * 5000}", r"spec: .* is not YAML \(.*\); mend its syntax"),
        ("seed: 2001-02-30", r"spec: .* is not YAML \(day is out of range for month\); mend its syntax"),
    ],
    ids=["characters", "levels", "aliases", "digits", "date"],
)
def test_what_is_not_read_is_told_in_a_line_with_its_own_fix(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"kind: scaling\n{text}\n")
    with pytest.raises(SpecError, match=f"^{line}$") as caught:
        load_spec(file)
    assert len(str(caught.value)) < 1_000


def test_of_thousands_of_mistakes_the_first_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text("kind: drill\nname: t\nbehaviours: [ok]\n" + "".join(f"key{n}: {n}\n" for n in range(3_000)))
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    complain(caught.value)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21
    assert lines[0] == "error: key0: unknown key (value 0); remove it or correct its spelling"
    assert lines[-1] == "error: and 2,980 more mistakes; mend these first"
