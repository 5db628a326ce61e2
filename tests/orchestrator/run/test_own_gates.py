"""A user's rules that cannot fail, or compare unlike with unlike, are refused when they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from nsa_command import nsa

from orchestrator.judge.rules import GatesError, load_gates
from orchestrator.run.gates import misdirected, own_gates

MEMORY = {"kind": "metric", "metric": "peak_memory", "unit": "MiB"}


def written(folder: Path, *rules: dict[str, Any], **more: Any) -> Path:
    complete = [{"rule": f"r{number}", "title": "R", "measure": "run it"} | rule for number, rule in enumerate(rules)]
    path = folder / "gates.yaml"
    path.write_text(yaml.safe_dump({"targets": [{"name": "t", "title": "T", "rules": complete}]} | more))
    return path


def ratio(numerator: str, denominator: str, **bound: float) -> dict[str, Any]:
    where = {"implementation": "triton"}
    return {
        "kind": "ratio",
        "numerator": {"metric": numerator},
        "denominator": {"metric": denominator, "where": where},
    } | bound


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (MEMORY | {"metric": "peak_memroy", "at_most": 1}, "metric: 'peak_memroy': no kind measures it; use peak"),
        (MEMORY | {"unit": "GiB", "at_most": 1}, "unit: 'GiB': peak_memory is in 'MiB'; write that"),
        (ratio("time", "peak_memory", at_most=1), "denominator: 'peak_memory' is in MiB, 'time' in ms; use one unit"),
        (MEMORY | {"at_least": 1.0}, "at_least: of peak_memory lower is better, so that only too good ones"),
        (ratio("throughput", "throughput", at_least=0.0), "at_least: 0: nothing is below it; give a bound"),
        ({"kind": "exponent", "metric": "time", "at_least": -1.0}, "at_least: -1: nothing is below it"),
        (
            MEMORY | {"at_most": 1.0, "measure": {"spec": "bench.yaml", "set": ["lengths=[0]"]}},
            "measure: bench.yaml: lengths.0: 0",
        ),
    ],
)  # fmt: skip
def test_a_rule_that_decides_nothing_is_refused(tmp_path: Path, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(GatesError) as refused:
        own_gates(written(tmp_path, rule))
    assert str(refused.value).startswith(f"targets.t.rules.r0.{message}")


def test_the_shipped_rules_can_all_fail() -> None:
    assert list(misdirected(load_gates())) == []


def test_a_bound_from_both_sides_is_a_rule(tmp_path: Path) -> None:
    assert own_gates(written(tmp_path, MEMORY | {"at_least": 10.0}, MEMORY | {"at_most": 20.0}))


def test_a_ratio_with_itself_and_a_wrong_architecture_are_refused(tmp_path: Path) -> None:
    side = {"metric": "time"}
    with pytest.raises(GatesError, match="denominator: is the numerator, so that the ratio is 1"):
        own_gates(written(tmp_path, {"kind": "ratio", "numerator": side, "denominator": side, "at_most": 1.0}))
    card = {"name": "1x-a100", "title": "A100", "gpu": "NVIDIA A100*", "gpus": 1, "architecture": "sm90"}
    with pytest.raises(GatesError, match=r"architecture: 'sm90': 'NVIDIA A100\*' is sm80; write that"):
        own_gates(written(tmp_path, MEMORY | {"at_most": 1.0}, hardware=[card]))


def test_rules_are_checked_by_a_command_without_a_database(tmp_path: Path) -> None:
    path = written(tmp_path, MEMORY | {"at_most": 1.0})
    assert "1 targets with 1 rules: no mistake" in nsa("gate", "--check", "--gates", str(path)).out
