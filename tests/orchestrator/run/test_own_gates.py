"""A user's rules that cannot fail, or compare unlike with unlike, are refused when they are read."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from nsa_command import nsa

from orchestrator.judge.rules import GatesError, load_gates
from orchestrator.judge.scope import Hardware
from orchestrator.run.gates import misdirected, own_gates

SIDES = (("numerator", 2048), ("denominator", 512))
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
        (
            MEMORY | {"at_least": 1.0, "where": {"implementation": ["dense", "triton"]}},
            "at_least: of peak_memory lower is better",
        ),
        (ratio("throughput", "throughput", at_least=0.0), "at_least: 0: nothing is below it; give a bound"),
        ({"kind": "exponent", "metric": "time", "at_least": -1.0}, "at_least: -1: nothing is below it"),
        (MEMORY | {"proof": "longst", "at_most": 1}, "proof: 'longst': no kind measures it; use longest"),
        (
            {"kind": "metric", "metric": "recall", "unit": "%", "at_least": 0.0},
            "at_least: 0: nothing is below it; give a bound",
        ),
        (
            MEMORY | {"where": {"implementation": ["tritn"]}, "at_most": 1},
            "implementation: 'tritn': there is none; use triton",
        ),
        (MEMORY | {"where": {"job": ["scalng", "bench"]}, "at_most": 1.0}, "job: 'scalng': there is none; use scaling"),
        (ratio("time", "time", at_most=1) | {"same": ["point_id"]}, "denominator: is the numerator, so that the ratio"),
        (
            ratio("oracle_error", "oracle_error_bound", at_most=1)
            | {"numerator": {"metric": "oracle_error", "where": {"implementation": "dense*"}}, "same": ["point_id"]},
            "same: no point matches both sides' implementation, so that there is no pair",
        ),
        (
            ratio("time", "time", at_most=1) | {"numerator": {"metric": "time", "where": {"implementation": "nsa"}}},
            "denominator: is the numerator, so that the ratio",
        ),
        (
            ratio("time", "time", at_most=1) | {"where": {"implementation": ["triton"]}},
            "denominator: is the numerator, so that the ratio",
        ),
        (
            ratio("time", "time", at_most=5) | {"numerator": {"metric": "time", "where": {"implementation": "dense*"}}},
            "at_most: of time of dense or naive attention divided by another's higher is better",
        ),
        (MEMORY | {"at_most": 1e300}, "at_most: 1e+300: nothing is above it; give a bound that can be missed"),
        (MEMORY | {"at_least": 1e-300}, "at_least: 1e-300: nothing is below it"),
        (ratio("time", "time", at_most=1e12), "at_most: 1e+12: nothing is above it"),
        ({"kind": "exponent", "metric": "time", "at_most": 100.0}, "at_most: 100: nothing is above it"),
        (
            {"kind": "metric", "metric": "throughput_drift", "unit": "%/h", "at_least": -1e300},
            "at_least: -1e+300: nothing is below it",
        ),
        (MEMORY | {"at_most": 1.0, "min_points": 10**9}, "min_points: 1000000000: Input should be less than or equal"),
        ({"kind": "states", "because": "WrongReslt"}, "because: 'WrongReslt': no reason begins so; use WrongResult"),
        ({"kind": "states", "because": "ValueEror: x"}, "because: 'ValueEror: x': no reason begins so; use ValueError"),
        (
            ratio("time", "time", at_most=1) | {"same": []},
            "same: compares points of unlike seq_len, pass, query_heads, kv_heads, head_dim; add these, or leave same",
        ),
        (ratio("time", "time", at_most=1) | {"same": ["gpu"]}, "same: compares points of unlike seq_len, pass, query"),
        (ratio("time", "time", at_most=1) | {"same": ["seq_len"]}, "same: compares points of unlike pass, query_heads"),
        (
            ratio("time", "time", at_most=1)
            | {"where": {"seq_len": {"at_least": 8192}}, "same": ["pass", "query_heads", "kv_heads", "head_dim"]},
            "same: compares points of unlike seq_len; add these",
        ),
        ({"kind": "states", "none_of": []}, "none_of: names no failure, so that all may fail; use some of crash, err"),
        ({"kind": "states", "none_of": ["skipped"]}, "none_of: names no failure"),
        (
            {"kind": "states", "but": {"spinn": "hang"}},
            "implementation: 'spinn': there is none; use spin",
        ),
        (
            MEMORY | {"at_most": 1.0, "measure": {"spec": "bench.yaml", "set": ["lengths=[0]"]}},
            "measure: bench.yaml: lengths.0: 0",
        ),
    ],
)  # fmt: skip
def test_a_rule_that_decides_nothing_is_refused(tmp_path: Path, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(GatesError) as refused:
        own_gates(written(tmp_path, rule))
    assert re.match(rf"targets\.(t|0)\.rules\.(r)?0\.(\w+\.)?{re.escape(message)}", str(refused.value))


def test_a_plans_number_bounds_what_has_its_unit(tmp_path: Path) -> None:
    plan = {"steps": 100, "tokens_per_step": 4096, "hours": 1, "seq_len": 2048}
    speed = {"kind": "metric", "metric": "throughput", "unit": "tok/s"}
    longest = {"kind": "metric", "metric": "longest", "unit": "token", "at_least": "seq_len"}
    path = written(tmp_path, speed | {"at_least": "seq_len"}, speed | {"at_least": "plan"}, longest)
    path.write_text(path.read_text() + f"  plan: {plan}\n")
    with pytest.raises(GatesError) as refused:
        own_gates(path)
    message = "targets.t.rules.r0.at_least: 'seq_len': is in token, unlike the rule's value; write a number"
    assert str(refused.value) == message


def test_points_that_where_makes_alike_are_a_ratio_and_reasons_in_words_a_rule(tmp_path: Path) -> None:
    heads = {"query_heads": 12, "kv_heads": 2, "head_dim": 64}
    at_two_lengths = ratio("time", "time", at_most=5) | {"where": heads | {"pass": "forward"}, "same": ["dtype"]}
    at_two_lengths |= {side: {"metric": "time", "where": {"seq_len": n}} for side, n in SIDES}
    begins = [{"kind": "states", "because": text} for text in ("Wrong", "no progress for", "MyKernelBroke: tile")]
    assert len(own_gates(written(tmp_path, at_two_lengths, *begins)).targets[0].rules) == 4


def test_a_speedup_a_falling_rate_and_a_control_of_dense_attention_are_rules(tmp_path: Path) -> None:
    dense = {"where": {"implementation": "dense*"}}
    speedup = ratio("time", "time", at_least=1.5) | {"numerator": {"metric": "time"} | dense}
    falls = {"kind": "exponent", "metric": "throughput", "at_least": -0.2}
    control = {"kind": "exponent", "metric": "time", "at_least": 1.5} | dense
    assert len(own_gates(written(tmp_path, speedup, falls, control)).targets[0].rules) == 3


def test_a_bound_is_looked_at_on_each_hardware(tmp_path: Path) -> None:
    cards = [{"name": f"{n}x-x", "title": "X", "gpu": "X", "gpus": n} for n in (1, 2)]
    speed = {"kind": "metric", "metric": "throughput", "unit": "tok/s", "gpus": "all", "at_least": 9.0}
    changed = [{"per_hardware": {"1x-x": {"at_least": 0.0}}}, {"on_several": {"at_least": -1.0}}, {"min_gpus": 4}]
    path = written(tmp_path, *(speed | change for change in changed), hardware=cards)
    rules = yaml.safe_load(path.read_text())
    rules["targets"][0]["hardware"] = ["1x-x", "2x-x"]
    path.write_text(yaml.safe_dump(rules))
    with pytest.raises(GatesError) as refused:
        own_gates(path)
    assert str(refused.value).splitlines() == [
        "targets.t.rules.r0.at_least: 0: nothing is below it; give a bound that can be missed (on 1x-x)",
        "targets.t.rules.r1.at_least: -1: nothing is below it; give a bound that can be missed (on 2x-x)",
        "targets.t.rules.r2.min_gpus: 4: no hardware of the target has so many; lower it",
    ]


def test_the_shipped_rules_can_all_fail() -> None:
    assert list(misdirected(load_gates())) == []


def test_a_bound_from_both_sides_is_a_rule(tmp_path: Path) -> None:
    assert own_gates(written(tmp_path, MEMORY | {"at_least": 10.0}, MEMORY | {"at_most": 20.0}))
    of_others = MEMORY | {"at_most": 20.0, "where": {"implementation": "chunked"}}
    with pytest.raises(GatesError, match=r"r0\.at_least: of peak_memory lower is better"):
        own_gates(written(tmp_path, MEMORY | {"at_least": 10.0}, of_others))


def test_a_ratio_with_itself_and_a_wrong_architecture_are_refused(tmp_path: Path) -> None:
    side = {"metric": "time"}
    with pytest.raises(GatesError, match="denominator: is the numerator, so that the ratio is 1"):
        own_gates(written(tmp_path, {"kind": "ratio", "numerator": side, "denominator": side, "at_most": 1.0}))
    card = {"name": "1x-a100", "title": "A100", "gpu": "NVIDIA A100*", "gpus": 1, "architecture": "sm90"}
    with pytest.raises(GatesError, match=r"architecture: 'sm90': 'NVIDIA A100\*' takes A100, which is sm80; write"):
        own_gates(written(tmp_path, MEMORY | {"at_most": 1.0}, hardware=[card]))
    with pytest.raises(GatesError, match=r"architecture: 'sm80': 'NVIDIA H20' takes H20, which is sm90; write"):
        own_gates(
            written(
                tmp_path, MEMORY | {"at_most": 1.0}, hardware=[card | {"gpu": "NVIDIA H20", "architecture": "sm80"}]
            )
        )
    for gpu in ("NVIDIA [AH]100*", "*"):
        with pytest.raises(GatesError, match=f"architecture: 'sm90': {re.escape(repr(gpu))} takes A100, which is sm80"):
            own_gates(written(tmp_path, MEMORY | {"at_most": 1.0}, hardware=[card | {"gpu": gpu}]))
    other = card | {"gpu": "NVIDIA RTX A1000*", "architecture": "sm86"}
    assert own_gates(written(tmp_path, MEMORY | {"at_most": 1.0}, hardware=[other]))


@pytest.mark.parametrize(
    ("name", "pattern", "same"),
    [
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100*", True),
        ("NVIDIA A1000", "NVIDIA A100*", False),
        ("NVIDIA H200", "NVIDIA H20*", False),
        ("NVIDIA H200", "NVIDIA H200*", True),
        ("NVIDIA H200", "NVIDIA H*", True),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 30*", True),
    ],
)
def test_a_card_is_not_taken_for_one_whose_number_begins_alike(name: str, pattern: str, same: bool) -> None:
    assert Hardware(name="x", title="X", gpu=pattern, gpus=1).is_card(name) is same


def test_rules_are_checked_in_a_locale_without_unicode(tmp_path: Path) -> None:
    path = written(tmp_path, MEMORY | {"at_most": 1.0, "title": "Größe ≤ 1"})
    run = "import orchestrator.report.charts; from orchestrator.cli.commands import main; main()"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", run, "gate", "--check", "--gates", str(path)]
    done = subprocess.run(
        command, env=os.environ | ascii_only, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, "no mistake" in done.stdout) == (0, True), done.stderr


def test_rules_are_checked_by_a_command_without_a_database(tmp_path: Path) -> None:
    path = written(tmp_path, MEMORY | {"at_most": 1.0})
    assert "1 targets with 1 rules: no mistake" in nsa("gate", "--check", "--gates", str(path)).out
