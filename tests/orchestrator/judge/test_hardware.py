"""Targets per hardware: one card's evidence is not another's, except where a rule transfers it, which is shown."""

import re
from pathlib import Path

import pytest
from made_up_runs import changed

from jobs.schema.axes import MODEL, MORE, Axis
from jobs.schema.states import PointState, Result
from jobs.schema.training_plan import PACK
from orchestrator.judge.analysis import NSA, named
from orchestrator.judge.decisions import decisions
from orchestrator.judge.rules import GatesError, load_gates
from orchestrator.judge.scope import ANY, Scope, Where
from orchestrator.judge.steps import forecast
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict, evaluate
from orchestrator.store import Store
from orchestrator.store.records import OutcomeRecord, Record

H100, H200, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
GO, NO_GO, UNKNOWN = Result.GO, Result.NO_GO, Result.UNKNOWN
FILE = """
hardware:
  - {name: 1x-h100, title: 1x H100, gpu: "*H100*", gpus: 1, architecture: sm90, accelerator: H100}
  - {name: 1x-h200, title: 1x H200, gpu: "*H200*", gpus: 1, architecture: sm90, accelerator: H200}
  - {name: 2x-h200, title: 2x H200, gpu: "*H200*", gpus: 2, architecture: sm90, accelerator: H200}
  - {name: 1x-a100, title: 1x A100, gpu: "*A100*", gpus: 1, architecture: sm80}
  - {name: cpu, title: CPU, gpus: 0}
targets:
  - name: t
    title: T
    hardware: [1x-h100, 1x-h200, 2x-h200, 1x-a100, cpu]
    rules:
      - &time {rule: own, title: R, kind: metric, metric: time, unit: ms, at_most: 1000, measure: run it}
      - {<<: *time, rule: alike, transfers: true}
      - {<<: *time, rule: whole, gpus: all}
      - {<<: *time, rule: several, gpus: all, min_gpus: 2}
      - {<<: *time, rule: chunked, where: {implementation: triton}, per_hardware: {
          cpu: {where: {implementation: chunked}, at_most: 1}}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "gates.yaml").write_text(FILE)
    return tmp_path / "gates.yaml"


def judged(store: Store, path: Path) -> dict[str, dict[str, RuleVerdict]]:
    return {each.hardware.name: rules(each) for each in evaluate(store, load_gates(path)) if each.hardware}


def rules(verdict: TargetVerdict) -> dict[str, RuleVerdict]:
    return {rule.rule: rule for rule in verdict.rules}


def on_ranks(records: list[Record], ranks: int) -> list[Record]:
    """The records of a later sweep whose points used so many GPUs together."""
    return changed(records, {"ranks": ranks}, year=2027, run={"axes": (Axis("ranks", "whole", "ranks"),)})


def test_evidence_of_one_card_is_not_anothers(sqlite_store: Store, sweep, path: Path):
    sqlite_store.apply_many(sweep(laws={"triton": 1.0}, gpu=H200))
    results = {name: found["own"].result for name, found in judged(sqlite_store, path).items()}
    assert results == {"1x-h100": UNKNOWN, "1x-h200": GO, "2x-h200": GO, "1x-a100": UNKNOWN, "cpu": UNKNOWN}


def test_a_rule_that_transfers_takes_a_card_of_the_same_architecture_and_says_so(
    sqlite_store: Store, sweep, path: Path
):
    sqlite_store.apply_many(sweep(laws={"triton": 1.0}, gpu=H200))
    found = judged(sqlite_store, path)
    alike = found["1x-h100"]["alike"]
    assert (alike.result, alike.transferred) == (GO, H200)
    assert alike.reason.startswith(f"transferred from {H200}: ")
    assert found["1x-h200"]["alike"].transferred is None
    assert [found[name]["alike"].result for name in ("1x-a100", "cpu")] == [UNKNOWN, UNKNOWN]
    gates = load_gates(path).only("t/1x-h100")
    (decision,) = decisions(gates, evaluate(sqlite_store, gates))
    assert decision.sentences == ["Not yet: nothing measured on 1x H100."]


def test_nothing_transfers_to_a_card_on_which_it_failed(sqlite_store: Store, sweep, path: Path):
    broken = sweep("own", laws={"triton": 1.0}, lengths=(512,), gpu=H100, failures={PointState.ERROR: "wrong"})
    without = [r.model_copy(update={"metrics": ()}) if isinstance(r, OutcomeRecord) else r for r in broken]
    sqlite_store.apply_many(without)
    sqlite_store.apply_many(sweep("other", laws={"triton": 1.0}, gpu=H200))
    assert judged(sqlite_store, path)["1x-h100"]["alike"].result is UNKNOWN


def test_rules_of_the_whole_machine_take_points_on_all_of_its_gpus(sqlite_store: Store, sweep, path: Path):
    sqlite_store.apply_many(sweep("one", laws={"triton": 1.0}, gpu=H200))
    found = judged(sqlite_store, path)
    assert [found[name]["whole"].result for name in ("1x-h200", "2x-h200")] == [GO, UNKNOWN]
    assert "several" not in found["1x-h200"]
    sqlite_store.apply_many(on_ranks(sweep("two", laws={"triton": 4.0}, gpu=H200), 2))
    found = judged(sqlite_store, path)
    assert [found["2x-h200"][name].run_id for name in ("own", "whole", "several")] == ["one", "two", "two"]
    assert [found["1x-h200"][name].result for name in ("own", "whole")] == [GO, GO]


def test_a_rule_may_differ_per_hardware(sqlite_store: Store, sweep, path: Path):
    sqlite_store.apply_many(sweep("card", laws={"triton": 1.0, "chunked": 9.0}, gpu=H200))
    sqlite_store.apply_many(sweep("laptop", laws={"triton": 9.0, "chunked": 1.0}))
    gates = load_gates(path)
    for _ in range(2):  # the filters' caches must not reach from one hardware to another
        found = {each.hardware.name: rules(each)["chunked"] for each in evaluate(sqlite_store, gates) if each.hardware}
        assert (found["1x-h200"].value, found["1x-h200"].bound, found["1x-h200"].result) == (8.0, 1000, GO)
        assert (found["cpu"].value, found["cpu"].bound, found["cpu"].result) == (8.0, 1, NO_GO)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus: 0}", "gpus: 1}", "a machine with gpus has a gpu"),
        ("hardware: [1x-h100,", "hardware: [3x-h100,", "targets.t.hardware: '3x-h100' is unknown"),
        ("hardware: [1x-h100,", "hardware: [cpu, 1x-h100,", "targets.t.hardware: 'cpu' comes twice"),
        ("    hardware: [1x-h100, 1x-h200, 2x-h200, 1x-a100, cpu]\n", "", "alike.transfers: needs a target with hardw"),
        ("cpu: {where", "tpu: {where", "chunked.per_hardware: 'tpu' is not hardware of this target"),
        ("at_most: 1}}", "at_least: 1}}", "per_hardware.cpu.at_least: is not the bound of this rule"),
        ("measure: run it", "measure: {spec: nonesuch.yaml}", "spec: 'nonesuch.yaml': is no ready spec; use one of"),
        ("measure: run it", "measure: {set: [a=1], text: x}", "set: needs a spec"),
        ("at_most: 1}}", "at_most: .nan}}", "per_hardware.cpu.at_most: nan: "),
        ("at_most: 1}}", "measure: null}}", "per_hardware.cpu.measure: "),
        ("accelerator: H200", "accelerator: ''", "hardware.1x-h200.accelerator: ''"),
    ],
)
def test_mistakes_about_hardware_are_told(path: Path, old: str, new: str, message: str):
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(GatesError) as caught:
        load_gates(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("card", ["NVIDIA GH200 480GB", "NVIDIA H200 MIG 1g.18gb"])
def test_another_card_with_the_name_inside_or_a_slice_is_not_the_card(sqlite_store: Store, sweep, card: str):
    sqlite_store.apply_many(sweep(laws={"triton": 1.0, "naive": 2.0}, gpu=card))
    assert not any(each.judged for each in evaluate(sqlite_store, load_gates()))


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("1x-a100", A100),
        ("1x-a100", "NVIDIA A100 80GB PCIe"),
        ("1x-h100", H100),
        ("1x-h200", H200),
        (None, "NVIDIA A100-SXM4-40GB"),
    ],
)
def test_the_cards_of_the_default_hardware(name: str | None, card: str):
    assert [each.name for each in load_gates().hardware if each.is_card(card) and each.gpus == 1] == [name] * bool(name)


@pytest.mark.parametrize("axis", [MODEL, PACK])
def test_only_a_rule_that_says_so_is_about_models_of_ones_own_and_packed_trainings(axis: Axis) -> None:
    row = {"device": "cuda", f"{MORE}{axis.name}": "on"}
    assert not Scope(ANY).matches(row)
    assert Scope(ANY).matches({**row, f"{MORE}{axis.name}": None})
    assert Scope(Where.model_validate({"axes": {axis.name: "on"}})).matches(row)


@pytest.mark.parametrize("name", ["nsa", "triton", ["triton", "dense"], "ns*", "tri*"])
def test_a_rule_may_name_nsa_by_its_backend(name: str | list[str]) -> None:
    where = Where.model_validate({"implementation": name})
    assert where.matches({"implementation": "nsa"})
    assert not where.matches({"implementation": "naive"})


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("nsa", NSA),
        ("triton forward S=64", f"{NSA} forward S=64"),
        ("nsa m7c_125m S=64", "nsa m7c_125m S=64"),  # a training's label, on any backend
        ("native-sparse-attention-triton", "native-sparse-attention-triton"),
        ("torch 2.11, triton 3.6", "torch 2.11, triton 3.6"),
    ],
)
def test_only_the_kernels_are_called_nsa_triton(words: str, read: str) -> None:
    assert named(words) == read


def test_a_forecast_rests_on_published_runs_of_as_many_points():
    content, machines = {"name": "scaling-m7c", "kind": "scaling"}, load_gates(None).hardware
    lines = forecast(content, 128, 1, machines)
    assert any(re.match(r"\d+ min, [\d.]+ GPU-h, \$[\d.]+ on 1× H200 \(published results", line) for line in lines)
    assert forecast(content, 127, 1, machines) == []
