"""Gates: a rule that holds is GO, a violated one NO-GO, an unmeasured one UNKNOWN; bad rules give one-line errors."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_up_runs import changed
from rich.console import Console
from statements import verdicts_of

import orchestrator
from jobs.schema.states import PointState, Result, RunState
from orchestrator.judge.rules import GatesError, load_gates
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict, evaluate, save_verdicts
from orchestrator.report.summary import print_verdicts
from orchestrator.store import Store
from orchestrator.store.importer import import_file
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, Record

DATA = Path(orchestrator.__file__).parent / "reference_data"
RUN = "20261120-120000-demo-abcd"
GO, NO_GO, UNKNOWN = Result.GO, Result.NO_GO, Result.UNKNOWN


def gates_of(tmp_path: Path, *rules: dict, **target: object):
    base = {"name": "t", "title": "T", **target}
    complete = [{"rule": f"r{n}", "title": "R", "measure": "run it", **rule} for n, rule in enumerate(rules)]
    path = tmp_path / "gates.yaml"
    path.write_text(yaml.safe_dump({"targets": [{**base, "rules": complete}]}))
    return load_gates(path)


def with_bound(records: list[Record], bound: float | None = 1e-3) -> list[Record]:
    """The records with the oracle's bound added to each ok point."""
    extra = [] if bound is None else [MetricData(name="oracle_error_bound", unit="1", value=bound)]
    return changed(records, metrics=extra)


def linear(store: Store) -> TargetVerdict:
    (verdict,) = evaluate(store, load_gates().only("linear-scaling/cpu"))
    return verdict


def by_rule(verdict: TargetVerdict) -> dict:
    return {rule.rule: rule for rule in verdict.rules}


def test_a_good_demo_is_go_with_values_margins_and_evidence(store: Store, sweep):
    store.apply_many(with_bound(sweep(failures={PointState.SKIPPED: "needs 93 GiB"})))
    verdict = linear(store)
    assert verdict.result is GO
    rules = by_rule(verdict)
    memory = rules["memory-exponent"]
    assert (memory.value, memory.margin) == (pytest.approx(1.0), pytest.approx(0.15))
    assert memory.limit == "<= 1.15"
    assert set(memory.evidence) == {f"{RUN}/{n}" for n in range(4)}
    assert "grows as S^1.000 (95 % interval" in memory.reason
    assert rules["naive-contrast"].margin == pytest.approx(0.3)
    assert rules["correctness"].value == pytest.approx(1e-3)
    assert rules["no-failures"].value == 0


@pytest.mark.parametrize(
    ("change", "rule", "result"),
    [
        ({"laws": {"chunked": 1.3, "naive": 2.0}}, "memory-exponent", NO_GO),
        ({"laws": {"chunked": 1.0, "naive": 1.5}}, "naive-contrast", NO_GO),
        ({"laws": {"chunked": 1.0}}, "naive-contrast", UNKNOWN),
        ({"lengths": (512, 1024)}, "memory-exponent", UNKNOWN),
        ({"failures": {PointState.HANG: "silent"}}, "no-failures", NO_GO),
        ({"failures": {PointState.CRASH: "signal 9"}}, "no-failures", NO_GO),
        ({"bound": 1e-7}, "correctness", NO_GO),
        ({"bound": None}, "correctness", UNKNOWN),
    ],
)
def test_each_rule_can_fail_or_lack_evidence(sqlite_store: Store, sweep, change: dict, rule: str, result: Result):
    bound = change.pop("bound", 1e-3)
    sqlite_store.apply_many(with_bound(sweep(**change), bound))
    verdict = linear(sqlite_store)
    judged = by_rule(verdict)[rule]
    assert judged.result is result
    assert verdict.result is result
    if result is UNKNOWN:
        assert judged.value is None
        assert judged.reason.startswith("not measured")
        assert "run `nsa submit jobs/configs/demo.yaml`" in judged.reason
    else:
        assert judged.margin < 0


def test_reported_figures_are_not_evidence(sqlite_store: Store, tmp_path: Path):
    gates = gates_of(
        tmp_path,
        {"kind": "metric", "metric": "peak_memory", "unit": "MiB", "at_most": 1e9},
        {"kind": "exponent", "metric": "peak_memory", "at_most": 2},
        {"kind": "states", "none_of": ["crash"]},
    )
    for path in DATA.glob("*.csv"):
        import_file(sqlite_store, path)
    assert {rule.result for rule in evaluate(sqlite_store, gates)[0].rules} == {UNKNOWN}


def test_a_point_without_its_check_leaves_correctness_open(sqlite_store: Store, sweep):
    records = with_bound(sweep())
    last = next(record for record in reversed(records) if isinstance(record, OutcomeRecord))
    bare = last.model_copy(update={"metrics": last.metrics[:2]})
    sqlite_store.apply_many([bare if record is last else record for record in records])
    judged = by_rule(linear(sqlite_store))["correctness"]
    assert judged.result is UNKNOWN
    assert "1 point(s) lack it, e.g. naive S=4096 (ok)" in judged.reason


def test_cancelled_and_skipped_points_are_not_evidence_of_health(sqlite_store: Store, sweep, tmp_path: Path):
    gates = gates_of(tmp_path, {"kind": "states", "none_of": ["hang"]})
    sqlite_store.apply_many(sweep("cut", failures={PointState.CANCELLED: "SIGTERM"}))
    (judged,) = evaluate(sqlite_store, gates, ["cut"])[0].rules
    assert (judged.result, "8 of 9 were run to their end" in judged.reason) == (UNKNOWN, True)
    sqlite_store.apply_many(sweep("empty", laws={"chunked": 1.0}, lengths=(), failures={PointState.SKIPPED: "big"}))
    assert evaluate(sqlite_store, gates, ["empty"])[0].result is UNKNOWN
    sqlite_store.apply_many(sweep("full", failures={PointState.SKIPPED: "big"}))
    assert evaluate(sqlite_store, gates, ["full"])[0].result is GO


@pytest.mark.parametrize("name", ["nsa", "triton"])
def test_an_exception_of_a_states_rule_names_nsa_as_where_does(sqlite_store: Store, sweep, tmp_path: Path, name: str):
    sqlite_store.apply_many(sweep(laws={"triton": 1.0}))
    (judged,) = evaluate(sqlite_store, gates_of(tmp_path, {"kind": "states", "but": {name: "oom"}}))[0].rules
    assert judged.value == len(judged.evidence) > 0


def test_a_fit_whose_interval_crosses_the_bound_is_unknown(sqlite_store: Store, sweep, tmp_path: Path):
    noisy = {f"{RUN}/0": 3.0, f"{RUN}/1": 9.0, f"{RUN}/2": 11.0}  # MiB at 512, 1024, 2048: a slope of 0.94 +- 4
    records = [
        record.model_copy(
            update={"metrics": (MetricData(name="peak_extra_memory", unit="MiB", value=noisy[record.point_id]),)}
        )
        if isinstance(record, OutcomeRecord)
        else record
        for record in sweep(laws={"chunked": 1.0}, lengths=(512, 1024, 2048))
    ]
    sqlite_store.apply_many(records)
    grows = {"kind": "exponent", "metric": "peak_extra_memory"}
    gates = gates_of(tmp_path, {**grows, "at_most": 1.1}, {**grows, "at_least": 0.9}, {**grows, "at_most": 0.9})
    at_most, at_least, failed = evaluate(sqlite_store, gates)[0].rules
    assert [at_most.result, at_least.result, failed.result] == [UNKNOWN, UNKNOWN, NO_GO]
    assert "reaches past the bound" in at_most.reason


def with_end(records: list[Record], state: RunState | None) -> list[Record]:
    """The records of a run that ended so; None: it has not ended."""
    end = [] if state is None else [records[-1].model_copy(update={"state": state})]
    return [*records[:-1], *end]


@pytest.mark.parametrize(
    ("state", "bound"), [(None, 1e-9), (RunState.CANCELLED, 1e-9), (RunState.FAILED, 1e-9), (RunState.DONE, 1e-3)]
)
def test_a_small_sweep_beside_a_complete_one_changes_no_verdict(
    sqlite_store: Store, sweep, state: RunState | None, bound: float
):
    """Nor does an incomplete one whose results are wrong, by a bound of 1e-9."""
    sqlite_store.apply_many(with_bound(sweep("whole")))
    before = evaluate(sqlite_store, load_gates())
    small = with_bound(sweep("small", lengths=(512, 1024)), bound)
    sqlite_store.apply_many(with_end(changed(small, year=2027), state))
    assert evaluate(sqlite_store, load_gates()) == before
    assert linear(sqlite_store).result is GO


@pytest.mark.parametrize(("bound", "result"), [(1e-9, NO_GO), (1e-3, GO)])
def test_one_point_of_another_run_changes_nothing_of_a_sweep(sqlite_store: Store, sweep, bound: float, result: Result):
    sqlite_store.apply_many(with_bound(sweep("whole"), bound))
    assert linear(sqlite_store).result is result
    sqlite_store.apply_many(changed(with_bound(sweep("other", laws={"dense": 1.0}, lengths=(512,))), year=2027))
    verdict = linear(sqlite_store)
    assert (verdict.result, {rule.run_id for rule in verdict.rules}) == (result, {"whole"})


def test_a_run_that_is_not_complete_is_named(sqlite_store: Store, sweep):
    sqlite_store.apply_many(with_end(with_bound(sweep("begun")), None))
    rule = by_rule(linear(sqlite_store))["correctness"]
    assert (rule.result, rule.value, rule.run_id) == (UNKNOWN, None, None)
    assert "no complete run: run begun at cccccccccc is running, 8 of 8 points ended; run `nsa submit" in rule.reason


def test_a_target_says_where_its_rules_rest_on_different_commits(sqlite_store: Store, sweep, tmp_path: Path):
    time = {"kind": "metric", "metric": "time", "unit": "ms", "at_most": 1e9}
    gates = gates_of(tmp_path, {**time, "where": {"implementation": "a"}}, {**time, "where": {"implementation": "b"}})
    sqlite_store.apply_many(sweep("one", laws={"a": 1.0}))
    own = {"git_commit": "d" * 40, "git_dirty": True}
    sqlite_store.apply_many(changed(sweep("two", laws={"b": 1.0}), year=2027, run=own))
    (verdict,) = evaluate(sqlite_store, gates)
    assert [rule.run_id for rule in verdict.rules] == ["one", "two"]
    assert verdict.commits == ["c" * 10, "d" * 10 + " (uncommitted changes)"]
    assert verdict.rules[0].reason.endswith("run one at cccccccccc")
    out = StringIO()
    print_verdicts([verdict], Console(file=out, width=200))
    assert "the evidence comes from several commits: cccccccccc, dddddddddd (uncommitted changes)" in out.getvalue()


def test_a_failure_without_a_known_gpu_counts_for_its_runs_gpu(sqlite_store: Store, sweep, tmp_path: Path):
    sqlite_store.apply_many(sweep(gpu="NVIDIA H200", failures={PointState.HANG: "silent"}))
    gates = gates_of(tmp_path, {"kind": "states", "where": {"gpu": "*H200*"}})
    assert evaluate(sqlite_store, gates)[0].result is NO_GO


def test_filters_choose_the_points(sqlite_store: Store, sweep, tmp_path: Path):
    sqlite_store.apply_many(sweep(gpu="NVIDIA H200"))
    chosen = [
        ({}, 8),
        ({"implementation": "naive"}, 4),
        ({"implementation": ["naive", "dense"]}, 4),
        ({"seq_len": 512}, 2),
        ({"seq_len": [512, 1024]}, 4),
        ({"seq_len": {"at_least": 600, "at_most": 2048}}, 4),
        ({"pass": "forward"}, 0),
        ({"gpu": "*H200*"}, 8),
        ({"gpu": "*A100*"}, 0),
        ({"job": "scaling", "query_heads": 12, "dtype": "float*"}, 8),
        ({"layers": 5}, 0),
    ]
    gates = gates_of(tmp_path, *({"kind": "states", "where": where} for where, _ in chosen))
    assert [len(rule.evidence) for rule in evaluate(sqlite_store, gates)[0].rules] == [count for _, count in chosen]


def test_metrics_take_the_worst_and_refuse_other_units(sqlite_store: Store, sweep, tmp_path: Path):
    sqlite_store.apply_many(sweep(laws={"chunked": 1.0}))
    time = {"kind": "metric", "metric": "time", "unit": "ms", "at_most": 7}
    gates = gates_of(tmp_path, time, {**time, "at_most": 8, "min_points": 5}, {**time, "unit": "s"})
    worst, few, unit = evaluate(sqlite_store, gates)[0].rules
    assert (worst.result, worst.value, worst.margin) == (NO_GO, 8.0, -1.0)
    assert (few.result, "only 4 of at least 5 points" in few.reason) == (UNKNOWN, True)
    assert (unit.result, "measured in 'ms'" in unit.reason) == (UNKNOWN, True)


def test_points_beside_themselves_alone_are_no_evidence(sqlite_store: Store, sweep, tmp_path: Path):
    sqlite_store.apply_many(sweep())
    sides = (("numerator", "chunk*"), ("denominator", "chunked"))
    rule = {name: {"metric": "time", "where": {"implementation": which}} for name, which in sides}
    [found] = evaluate(sqlite_store, gates_of(tmp_path, {"kind": "ratio", "at_most": 1.0} | rule))[0].rules
    assert found.result == UNKNOWN


def test_verdicts_are_stored_and_the_newest_shown(store: Store, sweep):
    empty = evaluate(store, load_gates())
    save_verdicts(store, None, empty)
    store.apply_many(with_bound(sweep()))
    save_verdicts(store, None, evaluate(store, load_gates()))
    save_verdicts(store, RUN, evaluate(store, load_gates(), [RUN]))
    frame = verdicts_of(store)
    assert set(frame.target) == {verdict.name for verdict in empty}
    shown = frame[frame.target == "linear-scaling/cpu"]
    assert set(shown.target_title) == {f"{linear(store).title} (on CPU)"}
    assert shown.result.tolist() == ["GO"] * 4
    assert shown.evidence.iloc[1] == [f"{RUN}/{n}" for n in range(4)]
    assert len(verdicts_of(store, RUN)) == len(frame)


CONTRADICTORY = {"steps": 50000, "tokens_per_step": 4096, "hours": 24, "tokens_per_second": 50}
RULE = {"kind": "metric", "metric": "time", "unit": "ms", "at_most": 1}


@pytest.mark.parametrize(
    ("rule", "target", "message"),
    [
        ({**RULE, "at_mots": 1}, {}, "targets.t.rules.r0.at_mots: unknown key (value 1)"),
        ({**RULE, "kind": "metrik"}, {}, "use exponent, metric, ratio or states"),
        ({**RULE, "at_least": 1}, {}, "give either at_most or at_least"),
        ({**RULE, "at_most": None, "at_least": "plan"}, {}, "'plan' needs a plan"),
        ({**RULE, "where": {"gpus": "x"}}, {}, "where.gpus: unknown key"),
        ({"kind": "states", "none_of": ["hung"]}, {}, "none_of.0: 'hung':"),
        ({**RULE, "at_most": None, "at_least": "much"}, {}, "rules.r0.at_least: 'much':"),
        ({"kind": "exponent", "at_most": 1}, {}, "metric: missing; add it"),
        (RULE, {"title": ""}, "title: '':"),
        ({**RULE, "at_most": float("nan")}, {}, "targets.t.rules.r0.at_most: nan"),
        ({"kind": "states", "where": {"axes": {"chunks": {}}}}, {}, "is empty"),
        ({"kind": "states", "where": {"axes": {"seq_len": 512}}}, {}, "is an axis of all kinds"),
        (
            RULE,
            {"plan": CONTRADICTORY},
            "tokens_per_second: 50 contradicts 50,000 steps of 4,096 tokens in 24 h, which n",
        ),
    ],
)
def test_bad_rules_are_one_line(tmp_path: Path, rule: dict, target: dict, message: str):
    with pytest.raises(GatesError) as caught:
        gates_of(tmp_path, rule, **target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_range_that_holds_nothing_is_refused(tmp_path: Path):
    with pytest.raises(GatesError, match="at_most: 1: is below at_least = 5; exchange them"):
        gates_of(tmp_path, {"kind": "states", "where": {"axes": {"chunks": {"at_least": 5, "at_most": 1}}}})


def test_an_unknown_target_is_named():
    with pytest.raises(GatesError, match="target: 'linear' is unknown; use one of m7c-125m, m7c-125m/1x-a100"):
        load_gates().only("linear")
    with pytest.raises(GatesError, match="target: 'linear-scaling/' is unknown"):
        load_gates().only("linear-scaling/")


@pytest.mark.parametrize("state", [None, RunState.CANCELLED, RunState.FAILED])
def test_a_run_that_is_measured_again_is_evidence_while_its_outcomes_count(
    sqlite_store: Store, sweep, tmp_path: Path, state: RunState | None
) -> None:
    """A run that is measured again is complete while each of its points has an outcome."""
    time = {"kind": "metric", "metric": "time", "unit": "ms", "at_most": 1000, "every": True}
    gates = gates_of(tmp_path, time, {"kind": "states", "none_of": ["error"]})
    records = sweep("run")
    sqlite_store.apply_many(records)
    [before] = evaluate(sqlite_store, gates)
    assert before.result is GO
    late = {"at": records[-1].at, "resumed": 1}
    plans = [record.model_copy(update=late | {"attempt": 1}) for record in records if isinstance(record, PointRecord)]
    sqlite_store.apply_many([records[0].model_copy(update=late), *plans])
    if state is not None:
        sqlite_store.apply_many([records[-1].model_copy(update=late | {"state": state})])
    [while_again] = evaluate(sqlite_store, gates)
    assert while_again.rules == before.rules
    wrong = {"run_id": "run", "point_id": plans[0].point_id, "attempt": 2, "at": records[-1].at}
    sqlite_store.apply_many([OutcomeRecord(**wrong, state=PointState.ERROR, reason="wrong")])
    [after] = evaluate(sqlite_store, gates)
    assert [rule.result for rule in after.rules] == [UNKNOWN, NO_GO]


# Losses are compared only where both trainings read the same text: files may be edited between two points of a run.

BYTES = {"files": 3, "train_bytes": 900, "heldout_bytes": 100, "sha256": "aa"}
TOKENS = {"heldout_sha256": "bb", "tokenizer_sha256": "cc", "documents": 7}


@pytest.fixture
def judged(sqlite_store: Store, sweep, tmp_path: Path):
    """Judges a run with losses of NSA and dense attention, each trained on a text of its own."""

    def judge(
        nsa: Any, dense: Any, metric: str = "heldout_loss", unit: str = "nat/byte", run: str = "r"
    ) -> RuleVerdict:
        records: list[Record] = []
        for record in sweep(run, laws={"triton": 1.0, "dense": 1.0}, lengths=(2048,)):
            if isinstance(record, OutcomeRecord):
                training = nsa if record.point_id.endswith("/0") else dense
                metrics = (MetricData(name=metric, unit=unit, value=1.5),)
                environment = record.environment | ({} if training is None else {"training": {"corpus": training}})
                record = record.model_copy(update={"metrics": metrics, "environment": environment})
            records.append(record.model_copy(update={"at": record.at.replace(year=2025 if run == "old" else 2026)}))
        sqlite_store.apply_many(records)
        sides = {
            side: {"metric": metric, "where": {"implementation": name}}
            for side, name in (("numerator", "triton"), ("denominator", "dense"))
        }
        return evaluate(sqlite_store, gates_of(tmp_path, {"kind": "ratio", "at_most": 1.02, **sides}))[0].rules[0]

    return judge


@pytest.mark.parametrize("other", [BYTES | {"sha256": "dd"}, TOKENS])
def test_losses_on_different_texts_are_not_compared(judged, other: dict) -> None:
    judged(BYTES, BYTES, run="old")
    verdict = judged(BYTES, other, run="r")
    assert (verdict.result, verdict.value, verdict.run_id) == (UNKNOWN, None, "r")
    assert verdict.reason.startswith(
        "not comparable: triton S=2048 and dense S=2048 were trained on different texts, as the files changed between "
        "them; run r at cccccccccc; "
    )


@pytest.mark.parametrize(
    ("nsa", "dense"),
    [
        (BYTES, dict(BYTES)),
        (TOKENS, TOKENS | {"documents": 9}),
        (BYTES, None),  # of a kind, or a version, that says nothing of a text
        ("of a strange kind", BYTES),
        ({"needles": 8}, {"needles": 8}),
    ],
)
def test_losses_on_the_same_text_are_compared(judged, nsa: Any, dense: Any) -> None:
    assert judged(nsa, dense).result is GO


def test_speed_is_compared_on_any_text(judged) -> None:
    assert judged(BYTES, TOKENS, metric="throughput", unit="1").result is GO
