"""Decisions: a sentence, and the steps that would settle what is open, with their cost."""

import dataclasses

import pytest
from made_up_runs import changed

from jobs.schema.states import PointState, Result
from orchestrator.judge.decisions import Decision, decisions
from orchestrator.judge.rules import load_gates
from orchestrator.judge.steps import Step, merged
from orchestrator.judge.verdicts import evaluate, judge
from orchestrator.store import Store
from orchestrator.store.records import Record

SCALING = "nsa submit jobs/configs/scaling_m7c.yaml --set resources.accelerator_type="


def fresh() -> dict[str, Decision]:
    gates = load_gates()
    return {each.name: each for each in decisions(gates, judge([], gates))}


def training(records: list[Record]) -> list[Record]:
    """The records of a sweep as a training of the plan's model."""
    shape = {"layers": 12, "seq_len": 2048, "batch": 2, "compile": "on", "cuda_graphs": "on", "checkpointing": "off"}
    return changed(records, shape, run={"kind": "train"})


def test_a_fresh_database_names_the_command_for_each_rule():
    verdicts = {verdict.name: verdict for verdict in fresh()["m7c-125m"].verdicts}
    for rule in verdicts["m7c-125m/1x-a100"].rules:
        assert rule.result is Result.UNKNOWN
        assert rule.step is not None
        assert rule.step.command is not None
        assert rule.step.command.startswith("nsa submit jobs/configs/")
        assert rule.step.command.endswith(" --set resources.accelerator_type=A100-80G")
        assert rule.step.price == 1.8
        assert rule.step.command in rule.reason
        assert rule.step.gpus == 1


def test_steps_are_merged_by_command_with_those_without_one_last():
    decision = fresh()["m7c-125m"]
    assert decision.result is Result.UNKNOWN
    assert decision.sentences == [
        "Not yet: nothing measured on 1× A100 80 GB, 2× A100 80 GB, 1× H100, 2× H100, 1× H200 or 2× H200."
    ]
    first, *_ = decision.steps
    assert first.command == f"{SCALING}A100-80G"
    assert first.hardware == "1× A100 80 GB, 2× A100 80 GB"
    assert first.settles == ("correctness", "memory-exponent", "no-failures")
    commands = [step.command for step in decision.steps if step.command]
    # On each card: sweep, matrix, learning, needles, training, estimate, capacity, soak, drill, and the bench, which
    # checks rows at its size; on two: ranks, and their soak.
    assert len(commands) == len(set(commands)) == len(decision.steps) == 3 * (10 + 2)
    lacking = dataclasses.replace(first, command=None, lacking="a job")
    assert [step.command for step in merged([lacking, first, lacking])] == [first.command, None]


def test_a_soak_takes_the_minutes_that_it_asks_for_on_any_card():
    steps = {step.command: step for step in fresh()["m7c-125m"].steps}
    soak = "nsa submit jobs/configs/soak_m7c.yaml --set seq_len=2048 --set batch=2 --set checkpoints.every=1000"
    several = " --set ranks=2 --set parallel=replicate"
    for settings in (" --set resources.accelerator_type=A100-80G", f"{several} --set resources.accelerator_type=H200"):
        step = steps[soak + settings]
        assert (step.minutes, step.basis) == (30, "the minutes of the spec, without start-up")
        assert {each.partition("-")[0] for each in step.settles} == {"soak"}


def test_a_predicted_duration_is_scaled_from_another_card():
    steps = {step.command: step for step in fresh()["linear-scaling"].steps}
    ours, theirs = steps[f"{SCALING}H200"], steps[f"{SCALING}A100-80G"]
    assert ours.minutes is not None
    assert theirs.minutes == pytest.approx(ours.minutes * 989.4 / 312)
    assert "scaled by published bf16 peaks (989 to 312 TFLOP/s)" in theirs.basis
    assert "on NVIDIA H200, whose published bf16 peak is the same" in steps[f"{SCALING}H100"].basis
    demo = steps["nsa submit jobs/configs/demo.yaml"]
    assert (demo.minutes, demo.basis, demo.gpus) == (None, "not known", 0)


def test_a_run_on_the_card_precedes_published_durations(sqlite_store: Store, sweep):
    def minutes(run_id: str, points: int, *crashed: PointState) -> Step:
        lengths = tuple(512 + n for n in range(points - len(crashed)))
        failures = dict.fromkeys(crashed, "killed")
        records = sweep(run_id, laws={"naive": 2.0}, lengths=lengths, gpu="NVIDIA A100-SXM4-80GB", failures=failures)
        sqlite_store.apply_many([records[0].model_copy(update={"name": "scaling-m7c"}), *records[1:]])
        gates = load_gates().only("m7c-125m")
        (decision,) = decisions(gates, evaluate(sqlite_store, gates))
        return next(step for step in decision.steps if step.command == f"{SCALING}A100-80G")

    assert "scaled" in minutes("small", 3).basis  # its few points are another amount of work
    assert "scaled" in minutes("broken", 128, PointState.CRASH).basis  # it ended before its work was done
    step = minutes("whole", 128)
    assert step.minutes == pytest.approx(1000 / 60)
    assert step.basis == "run whole at cccccccccc: 128 points on NVIDIA A100-SXM4-80GB"


def test_the_sentence_tells_the_headline_figures(sqlite_store: Store, sweep):
    sqlite_store.apply_many(training(sweep(laws={"triton": 1.0}, lengths=(2048,), gpu="NVIDIA H200")))
    gates = load_gates().only("m7c-125m")
    (decision,) = decisions(gates, evaluate(sqlite_store, gates))
    nothing, ours = decision.sentences
    assert nothing == "Not yet: nothing measured on 1× A100 80 GB, 2× A100 80 GB, 1× H100, 2× H100 or 2× H200."
    assert ours.startswith("On 1× H200: not known whether right (open: 12 of 12 rules); not known whether feasible (")
    assert "512,000 tok/s of 2,370 needed; not known whether worth it at S=2,048" in ours
    assert ours.endswith("; the plan takes 0.11 GPU-hours, $0.42.")


@pytest.mark.parametrize(
    ("laws", "result", "said"),
    [
        (
            {"chunked": 1.0, "naive": 2.0},
            Result.UNKNOWN,
            "On CPU: memory-exponent 1 (at most 1.15), naive-contrast 2 (",
        ),
        ({"chunked": 1.0, "naive": 1.6999}, Result.NO_GO, "No on CPU: naive-contrast 1.6999 (at least 1.7). "),
        (
            {"chunked": 1.0, "naive": 1.5},
            Result.NO_GO,
            "No on CPU: naive-contrast 1.5 (at least 1.7). Nothing measured",
        ),
    ],
)
def test_a_decision_follows_its_hardware(sqlite_store: Store, sweep, laws: dict, result: Result, said: str):
    sqlite_store.apply_many(sweep(laws=laws))
    gates = load_gates().only("linear-scaling")
    (decision,) = decisions(gates, evaluate(sqlite_store, gates))
    assert decision.result is result
    assert said in " ".join(decision.sentences)
