"""A database by which a plan is right, feasible and worth it; each of its mutations has the verdict that it should."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from jobs.schema.axes import Axis
from jobs.schema.states import PointState, Result, RunState
from jobs.schema.training_plan import MODE_AXES
from orchestrator.judge import evidence
from orchestrator.judge.decisions import answers, query
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import RuleVerdict, TargetVerdict, evaluate
from orchestrator.store import Store
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, Record, RunEndRecord, RunRecord

GO, NO_GO, UNKNOWN = Result.GO, Result.NO_GO, Result.UNKNOWN
FOREIGN = "f" * 40  # conftest.py
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
UNITS = {"time": "ms", "throughput": "tok/s", "peak_driver": "MiB", "peak_extra_memory": "MiB", "recall": "%"}
UNITS |= {
    "energy_per_token": "J/tok",
    "heldout_loss": "nat/byte",
    "foresight": "nat/byte",
    "throughput_drift": "%/h",
    "host_growth": "MiB/h",
}
UNITS |= dict.fromkeys(("reserved_growth", "driver_growth"), "%/1000 steps")
UNITS |= {"longest": "token", "shortest_failed": "token", "estimate_error": "%"}
DRILL = ("ok", "spin", "ok", "fill", "ok", "assert", "ok", "oom", "ok")
DRILLED = {"spin": "hang", "fill": "oom", "assert": "error", "oom": "oom"}
MODE = {"compile": "on", "cuda_graphs": "on", "checkpointing": "off", "steps": 200}


@dataclass
class Made:
    """A made-up point: its axes, metrics and state."""

    axes: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    state: PointState = PointState.OK
    reason: str | None = None
    gpu: str = H200
    card: dict[str, Any] = field(default_factory=dict)
    spread: float = 0.02


@dataclass
class Job:
    """A made-up run; `day` is that of its begin."""

    name: str
    kind: str
    points: list[Made]
    commit: str | None = "c" * 40
    dirty: bool = False
    day: int = 0
    state: RunState = RunState.DONE


def good() -> dict[str, Job]:
    """Runs on an H200 at S=2,048 by which everything about the plan is GO."""
    model = {"workload": "model", "pass_": "train", "seq_len": 2048, "batch": 2, "layers": 12}
    operator = {"workload": "attention", "pass_": "forward+backward", "batch": 2}
    exact = {"oracle_error": 0.5, "oracle_error_bound": 1.0, "rows_error": 0.5, "rows_error_bound": 1.0}
    train = {"throughput": 300_000.0, "peak_driver": 5_000.0, "energy_per_token": 1e-3, "time": 16.0}
    quiet = {"gpu_processes": 1.0, "gpu_throttled": 0.0}
    soak = {"reserved_growth": 0.01, "driver_growth": 0.01, "host_growth": 1.0}
    soak |= {"throughput_drift": -0.2, "interruptions": 0.0}

    def both(values: dict[str, float], worse: dict[str, float], axes: dict[str, Any]) -> list[Made]:
        return [
            Made(axes | {"implementation": name}, made | quiet) for name, made in (("triton", values), ("dense", worse))
        ]

    slower = train | {"throughput": 250_000.0, "energy_per_token": 1.2e-3, "time": 19.0}
    drills = [(each, DRILLED.get(each, "ok")) for each in DRILL]
    longest = {"seq_len": None, "checkpointing": "off"}
    sweep = []
    for length in (2048, 8192, 16384, 32768, 65536):
        values = exact | {"time": length / 2048, "peak_extra_memory": length / 64.0}
        sweep += both(values, exact | {"time": 1.5 * length / 2048}, operator | {"seq_len": length})
    learned = {"heldout_loss": 1.0, "foresight": 0.0}
    found = {"recall": 99.0, "converged": 1.0}
    nsa = model | {"implementation": "triton"}
    return {
        job.name: job
        for job in [
            Job("scaling-m7c", "scaling", sweep),
            Job("train-speed", "train", both(train, slower, model | MODE)),
            Job("learns-m7c", "train", both(learned, learned, model | MODE | {"batch": 16, "steps": 500})),
            Job("needle-m7c", "needle", both(found, found, model | MODE | {"batch": 32, "steps": 1000})),
            Job("soak-m7c", "soak", [Made(nsa | MODE | {"minutes": 30}, soak | quiet)]),
            Job("estimate-m7c", "estimate", [Made(nsa, {"estimate_error": 2.0} | quiet)]),
            Job("drill-gpu", "drill", [Made({"implementation": each}, {}, PointState(end)) for each, end in drills]),
            Job("backward-m7c", "backward", [Made(nsa, {}) for _ in range(20)]),
            Job("capacity-ladder", "capacity", [Made(nsa | longest, {"longest": 4096.0} | quiet)]),
        ]
    }


def records(run_id: str, job: Job) -> Iterable[Record]:
    at = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(days=job.day)
    own = (*MODE_AXES, Axis("minutes", "whole", "minutes"))
    start: dict[str, Any] = {"run_id": run_id, "at": at}
    told = {"spec": {}, "spec_hash": "5", "git_commit": job.commit, "git_dirty": job.dirty, "axes": own}
    yield RunRecord(**start, name=job.name, kind=job.kind, **told)
    heads = {"query_heads": 12, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "device": "cuda"}
    for number, made in enumerate(job.points):
        point: dict[str, Any] = start | {"point_id": f"{run_id}/{number}"}
        label = f"{made.axes['implementation']} {number}"
        axes = heads | made.axes
        yield PointRecord(**point, index=number, key=f"{number}", label=label, config={}, axes=axes)
        metrics = []
        for name, value in made.metrics.items():
            spread = {"p10": value * (1 - made.spread / 2), "p90": value * (1 + made.spread / 2)}
            more = spread if name == "time" else {}
            metrics.append(MetricData(name=name, unit=UNITS.get(name, "1"), value=value, **more))
        environment = {"gpu": {"name": made.gpu, "power_limit_w": "700", "ecc": "1"} | made.card}
        ended = {"attempt": 1, "state": made.state, "reason": made.reason, "environment": environment}
        yield OutcomeRecord(**point, **ended, metrics=tuple(metrics) if made.state is PointState.OK else ())
    if job.state is not RunState.RUNNING:
        yield RunEndRecord(run_id=run_id, at=at + timedelta(minutes=9), state=job.state)


def judged(store: Store, jobs: dict[str, Job]) -> TargetVerdict:
    for number, (key, job) in enumerate(jobs.items()):
        store.apply_many(list(records(f"run-{number}-{key}", job)))
    (verdict,) = evaluate(store, load_gates().only("m7c-125m/1x-h200"))
    return verdict


Mutation = Callable[[dict[str, Job]], Any]


def change(job: str, implementation: str | None = None, **metrics: float) -> Mutation:
    """Other metrics of a run's points, of one implementation if one is named."""

    def mutate(jobs: dict[str, Job]) -> None:
        for point in jobs[job].points:
            if implementation in (None, point.axes["implementation"]):
                point.metrics |= metrics

    return mutate


def points(job: str, **fields: Any) -> Mutation:
    """Other fields of a run's points; `axes` are laid over theirs."""

    def mutate(jobs: dict[str, Job]) -> None:
        axes = fields.get("axes", {})
        jobs[job].points = [replace(p, **fields | {"axes": p.axes | axes}) for p in jobs[job].points]

    return mutate


def run(job: str, **fields: Any) -> Mutation:
    """Other fields of a run."""
    return lambda jobs: jobs.update({job: replace(jobs[job], **fields)})


def without(job: str) -> Mutation:
    return lambda jobs: jobs.pop(job)


def newer(job: str, mutation: Mutation, **fields: Any) -> Mutation:
    """The run stays, and a mutated one of the next day comes beside it."""

    def mutate(jobs: dict[str, Job]) -> None:
        other = good()
        mutation(other)
        jobs[f"newer-{job}"] = replace(other[job], day=1, **fields)

    return mutate


def fails(job: str, state: PointState, number: int = 0) -> Mutation:
    """One point of a run ends so."""

    def mutate(jobs: dict[str, Job]) -> None:
        jobs[job].points[number].state = state

    return mutate


def shallow_fails_here(jobs: dict[str, Job]) -> None:
    """The needles of a smaller model crash on this card, those of the plan's are found on another."""
    other, smaller = good()["needle-m7c"], jobs["needle-m7c"]
    jobs["needle-h100"] = replace(other, points=[replace(p, gpu=H100) for p in other.points])
    smaller.points = [replace(p, state=PointState.CRASH, axes=p.axes | {"layers": 2}) for p in smaller.points]


def a_smaller_sweep_is_wrong(jobs: dict[str, Job]) -> None:
    """A newer sweep without its longest length gives wrong results."""
    sweep = good()["scaling-m7c"]
    sweep.points = [point for point in sweep.points if point.axes["seq_len"] < 65536]
    change("scaling-m7c", "triton", oracle_error=2.0)({"scaling-m7c": sweep})
    jobs["newer-scaling"] = replace(sweep, day=1)


def a_smaller_sweep_hangs(jobs: dict[str, Job]) -> None:
    a_smaller_sweep_is_wrong(jobs)
    jobs["newer-scaling"].points = [replace(point) for point in jobs["newer-scaling"].points]
    jobs["newer-scaling"].points[0].state = PointState.HANG


def a_point_of_it_crashes(jobs: dict[str, Job]) -> None:
    """A newer run of one point, too few for the rule."""
    first, *_ = good()["learns-m7c"].points
    jobs["newer-learns"] = replace(jobs["learns-m7c"], points=[replace(first, state=PointState.CRASH)], day=1)


def wrong_at_size(jobs: dict[str, Job]) -> None:
    point = jobs["scaling-m7c"].points[0]
    point.state, point.reason = PointState.ERROR, "WrongResult: triton: output is off by 9.9e-01 of the oracle's"


TABLE: dict[str, tuple[Mutation, str, Result]] = {
    # what happened: how the database differs, the rule that has to notice, its result
    "slower than dense at the plan's S": (change("train-speed", "triton", throughput=2e5), "trains-as-fast", NO_GO),
    "attention slower than dense": (change("scaling-m7c", "triton", time=50.0), "attention-time", NO_GO),
    "takes more energy": (change("train-speed", "triton", energy_per_token=2e-3), "energy", NO_GO),
    "takes more memory": (change("train-speed", "triton", peak_driver=7600.0), "memory-beside-dense", NO_GO),
    "too slow for the plan": (change("train-speed", "triton", throughput=2e3), "throughput", NO_GO),
    "117 GiB reserved": (change("train-speed", "triton", peak_driver=120_000.0), "peak-memory", NO_GO),
    "measured in another mode": (points("train-speed", axes={"cuda_graphs": "off"}), "throughput", UNKNOWN),
    "measured at another batch": (points("train-speed", axes={"batch": 16}), "throughput", UNKNOWN),
    "another shape": (points("train-speed", axes={"layers": 6}), "throughput", UNKNOWN),
    "another card": (points("train-speed", gpu=H100), "throughput", UNKNOWN),
    "a slice of the card": (points("train-speed", gpu="NVIDIA H200 MIG 1g.18gb"), "throughput", UNKNOWN),
    "wrong result": (change("scaling-m7c", "triton", oracle_error=2.0), "correctness", NO_GO),
    "right on small sizes only": (change("scaling-m7c", "triton", rows_error=2.0), "correct-at-size", NO_GO),
    "refused as wrong at its size": (wrong_at_size, "no-wrong-result", NO_GO),
    "never checked at its size": (points("scaling-m7c", metrics={"oracle_error": 0.1}), "correct-at-size", UNKNOWN),
    "learns worse": (change("learns-m7c", "triton", heldout_loss=1.05), "learns", NO_GO),
    "too good beside dense": (change("learns-m7c", "triton", heldout_loss=0.5), "not-too-good", NO_GO),
    "a trained model sees one token ahead": (change("learns-m7c", foresight=0.1), "causal", NO_GO),
    "both see the future": (change("learns-m7c", heldout_loss=0.05), "not-clairvoyant", NO_GO),
    "both did not learn": (change("learns-m7c", heldout_loss=10.2), "both-learned", NO_GO),
    "too few steps": (points("learns-m7c", axes={"steps": 20}), "learns", UNKNOWN),
    "needles not found": (change("needle-m7c", recall=1.6), "needle-found", NO_GO),
    "needles worse than dense": (change("needle-m7c", "triton", recall=95.0), "needle-beside-dense", NO_GO),
    "asked while still learning": (change("needle-m7c", converged=0.0), "needle-converged", NO_GO),
    "all backward passes hang": (points("backward-m7c", state=PointState.HANG), "backward-matrix", NO_GO),
    "one backward pass was lost": (fails("backward-m7c", PointState.LOST, 7), "backward-matrix", NO_GO),
    "half a matrix of backward passes": (
        lambda jobs: jobs["backward-m7c"].points.__delitem__(slice(10, None)),
        "backward-matrix",
        UNKNOWN,
    ),
    "no matrix of backward passes": (without("backward-m7c"), "backward-matrix", UNKNOWN),
    "a leak": (change("soak-m7c", reserved_growth=0.5), "soak-memory-slope", NO_GO),
    "a leak that the allocator does not see": (change("soak-m7c", driver_growth=0.5), "soak-driver-memory", NO_GO),
    "the host's memory leaks": (change("soak-m7c", host_growth=900.0), "soak-host-memory", NO_GO),
    "a soak of the former method": (points("soak-m7c", metrics={"memory_growth": 0.0}), "soak-memory-slope", UNKNOWN),
    "gets slower": (change("soak-m7c", throughput_drift=-9.0), "soak-throughput-drift", NO_GO),
    "killed while it soaked": (change("soak-m7c", interruptions=2.0), "soak-undisturbed", NO_GO),
    "the soak was lost": (fails("soak-m7c", PointState.LOST), "soak-lasts", NO_GO),
    "a soak of a minute": (points("soak-m7c", axes={"minutes": 1}), "soak-memory-slope", UNKNOWN),
    "a soak in another mode": (points("soak-m7c", axes={"compile": "off"}), "soak-lasts", UNKNOWN),
    "a wrong estimate": (change("estimate-m7c", estimate_error=-40.0), "estimator", NO_GO),
    "longer does not fit": (change("capacity-ladder", longest=1024.0, shortest_failed=2048.0), "capacity", NO_GO),
    "longer was not tried": (change("capacity-ladder", longest=1024.0), "capacity", UNKNOWN),
    "an endless kernel was not ended": (fails("drill-gpu", PointState.LOST, 1), "drill", NO_GO),
    "no point ran after the full card": (fails("drill-gpu", PointState.CRASH, 4), "drill", NO_GO),
    "what fails here runs elsewhere": (shallow_fails_here, "needle-found", UNKNOWN),
    "no drill": (without("drill-gpu"), "drill", UNKNOWN),
    "a newer run is worse": (newer("train-speed", change("train-speed", throughput=1e3)), "throughput", NO_GO),
    "a newer run crashed": (newer("train-speed", points("train-speed", state=PointState.CRASH)), "throughput", UNKNOWN),
    "a newer sweep is smaller and worse": (a_smaller_sweep_is_wrong, "correctness", UNKNOWN),
    "a newer sweep is smaller and hangs": (a_smaller_sweep_hangs, "no-failures", UNKNOWN),
    "a newer run of few points crashed": (a_point_of_it_crashes, "both-learned", UNKNOWN),
    "an older run is worse": (run("learns-m7c", day=2), "learns", GO),
    "a newer run is cancelled": (
        newer("train-speed", change("train-speed", throughput=1e3), state=RunState.CANCELLED),
        "throughput",
        GO,
    ),
    "uncommitted changes": (run("learns-m7c", dirty=True), "learns", UNKNOWN),
    "a commit of another history": (run("train-speed", commit=FOREIGN), "throughput", UNKNOWN),
    "nine processes on the card": (change("train-speed", gpu_processes=9.0), "throughput", UNKNOWN),
    "throttled": (change("train-speed", gpu_throttled=100.0), "trains-as-fast", UNKNOWN),
    "power capped": (points("train-speed", card={"power_limit_w": "300"}), "throughput", UNKNOWN),
    "ECC off": (points("train-speed", card={"ecc": "0"}), "throughput", UNKNOWN),
    "unsteady": (points("scaling-m7c", spread=1.2), "attention-time", UNKNOWN),
    "long ago": (run("train-speed", day=-200), "throughput", UNKNOWN),
}


def by_rule(verdict: TargetVerdict) -> dict[str, RuleVerdict]:
    return {rule.rule: rule for rule in verdict.rules}


def test_the_database_is_go_before_it_is_mutated(sqlite_store: Store) -> None:
    verdict = judged(sqlite_store, good())
    assert {rule.rule: (rule.result, rule.reason) for rule in verdict.rules if rule.result is not GO} == {}
    assert verdict.questions == dict.fromkeys(("right", "feasible", "worth it"), GO)
    assert [rule.rule for rule in verdict.rules if rule.transferred] == ["estimator"], "all else is of the plan's mode"


@pytest.mark.parametrize("what", TABLE)
def test_a_mutation_has_the_verdict_of_a_careful_engineer(sqlite_store: Store, what: str) -> None:
    mutate, rule, result = TABLE[what]
    jobs = good()
    mutate(jobs)
    verdict = judged(sqlite_store, jobs)
    assert (by_rule(verdict)[rule].result, by_rule(verdict)[rule].reason) == (result, by_rule(verdict)[rule].reason)
    assert verdict.result is not GO or result is GO


def test_a_run_of_unknown_commit_is_doubtful_where_there_is_a_history(
    sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "SOURCES", tmp_path)
    jobs = good()
    run("learns-m7c", commit=None)(jobs)
    assert by_rule(judged(sqlite_store, jobs))["learns"].result is GO, "as of an installed package"
    (tmp_path / ".git").mkdir()
    doubted = by_rule(judged(sqlite_store, jobs))["learns"]
    assert doubted.result is UNKNOWN
    assert "doubtful: its commit is unknown" in doubted.reason


def test_one_query_finds_each_figure_of_the_sentence(sqlite_store: Store) -> None:
    jobs = good()
    change("train-speed", "triton", throughput=2e5)(jobs)
    points("drill-gpu", state=PointState.LOST)(jobs)
    verdict = judged(sqlite_store, jobs)
    with sqlite_store.session() as session:
        found = {row.figure: row.value for row in session.execute(text(query(verdict)))}
    rules = by_rule(verdict)
    assert {name: found.pop(name) for name in found.keys() & rules.keys()} == {
        name: pytest.approx(rules[name].value) for name in ("learns", "drill", "trains-as-fast")
    }
    assert answers(verdict) == (
        "not feasible: drill 9 (at most 0 points); not worth it at S=2,048: dense attention trains 1.25 times as fast; "
        "right: held-out loss 1.000 times dense attention's; the plan takes 0.28 GPU-hours, $1.1; 1 of 29 rules rest "
        "on transferred evidence. NSA pays at all lengths measured, 2K to 2K"
    )
    assert found == {"GPU-hours": pytest.approx(50_000 * 4096 / 2e5 / 3600), "dollars": pytest.approx(1.08, abs=0.005)}


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ({2048: 1.2, 8192: 0.9}, "NSA pays from S = 6K (measured at 2K and 8K)"),
        ({2048: 0.9, 8192: 1.1}, "NSA pays at S = 2K of the lengths measured, 2K to 8K"),
        ({2048: 1.2, 8192: 0.9, 32768: 1.1}, "NSA pays at S = 8K of the lengths measured, 2K to 32K"),
        ({2048: 1.2, 8192: 1.1}, "NSA does not pay at any length measured, 2K to 8K"),
    ],
)
def test_a_crossover_is_said_as_it_was_measured(sqlite_store: Store, ratios: dict[int, float], words: str) -> None:
    model = {"workload": "model", "pass_": "train", "batch": 2, "layers": 12}
    speed = [
        Made(model | MODE | {"seq_len": length, "implementation": name}, {"time": time})
        for length, ratio in ratios.items()
        for name, time in (("triton", 10 * ratio), ("dense", 10.0))
    ]
    verdict = judged(sqlite_store, {"train-speed": Job("train-speed", "train", speed)})
    assert verdict.crossing is not None
    assert verdict.crossing.words == words
    if verdict.crossing.query:
        with sqlite_store.session() as session:
            assert session.execute(text(verdict.crossing.query)).scalar_one() == pytest.approx(6144)


def test_a_crossover_names_its_doubts(sqlite_store: Store) -> None:
    jobs = good()
    change("train-speed", gpu_throttled=100.0)(jobs)
    verdict = judged(sqlite_store, jobs)
    assert verdict.crossing is not None
    assert verdict.crossing.words.endswith("; doubtful: the card throttled 100 % of the time")
