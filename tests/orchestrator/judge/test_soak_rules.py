"""The shipped rules about soaks, about learning and about needles: GO, NO-GO, UNKNOWN."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from jobs.schema.states import PointState, Result
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import evaluate
from orchestrator.store import Store
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, Record, RunRecord

GO, NO_GO, UNKNOWN = Result.GO, Result.NO_GO, Result.UNKNOWN
H200 = "NVIDIA H200"
STEADY = {"memory_growth": (0.001, "%/1000 steps"), "throughput_drift": (-0.2, "%/h")}

Values = Mapping[str, tuple[float, str]]


def run_of(records: list[Record], kind: str, name: str, values: Callable[[str], Values], **axes: int) -> list[Record]:
    """The records of a sweep as a run of another kind of the plan's model, with other metrics.

    Args:
        values: value and unit of each metric, by the implementation of the point.
    """
    labels = {record.point_id: record.axes["implementation"] for record in records if isinstance(record, PointRecord)}
    shape = {"workload": "model", "layers": 12, "batch": 2, **axes}
    changed: list[Record] = []
    for record in records:
        if isinstance(record, RunRecord):
            record = record.model_copy(update={"kind": kind, "name": name})
        elif isinstance(record, PointRecord):
            record = record.model_copy(update={"axes": {**record.axes, **shape}})
        elif isinstance(record, OutcomeRecord) and record.state is PointState.OK:
            found = values(labels[record.point_id]).items()
            metrics = tuple(MetricData(name=metric, unit=unit, value=value) for metric, (value, unit) in found)
            record = record.model_copy(update={"metrics": metrics})
        changed.append(record)
    return changed


def results(store: Store, hardware: str = "1x-h200") -> dict[str, Result]:
    (verdict,) = evaluate(store, load_gates().only(f"m7c-125m-training/{hardware}"))
    return {rule.rule: rule.result for rule in verdict.rules if rule.rule.startswith(("soak", "learns", "needle"))}


def soaked(sweep, values: Values, minutes: int = 30) -> list[Record]:
    records = sweep(laws={"triton": 1.0}, lengths=(2048,), gpu=H200)
    return run_of(records, "soak", "soak-m7c", lambda _: values, minutes=minutes)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (STEADY, (GO, GO)),
        (STEADY | {"memory_growth": (0.2, "%/1000 steps")}, (NO_GO, GO)),
        (STEADY | {"throughput_drift": (-6.0, "%/h")}, (GO, NO_GO)),
    ],
)
def test_a_soak_is_judged_by_its_slopes(
    sqlite_store: Store, sweep, values: Values, expected: tuple[Result, Result]
) -> None:
    sqlite_store.apply_many(soaked(sweep, values))
    found = results(sqlite_store)
    assert (found["soak-memory-slope"], found["soak-throughput-drift"]) == expected
    assert found["soak-lasts"] is GO
    assert results(sqlite_store, "1x-h100")["soak-memory-slope"] is UNKNOWN, "it is the card's own"


def test_a_short_soak_is_no_evidence(sqlite_store: Store, sweep) -> None:
    sqlite_store.apply_many(soaked(sweep, STEADY, minutes=1))
    assert set(results(sqlite_store).values()) == {UNKNOWN}


def test_a_soak_beyond_its_limit_is_no_go(sqlite_store: Store, sweep) -> None:
    sqlite_store.apply_many(
        record.model_copy(
            update={"state": PointState.ERROR, "reason": "MemoryLimit: rank 0 holds 66 GB", "metrics": ()}
        )
        if isinstance(record, OutcomeRecord)
        else record
        for record in soaked(sweep, STEADY)
    )
    found = results(sqlite_store)
    assert (found["soak-lasts"], found["soak-memory-slope"]) == (NO_GO, UNKNOWN)


@pytest.mark.parametrize(
    ("name", "nsa", "expected"),
    [("learns-m7c", 2.01, GO), ("learns-m7c", 2.05, NO_GO), ("train-m7c", 2.01, UNKNOWN)],  # the last: too few steps
)
def test_what_nsa_learns_is_held_against_dense_attention(
    sqlite_store: Store, sweep, name: str, nsa: float, expected: Result
) -> None:
    losses = {"triton": nsa, "dense": 2.0}
    records = sweep(laws={"triton": 1.0, "dense": 2.0}, lengths=(2048,), gpu=H200)
    sqlite_store.apply_many(
        run_of(records, "train", name, lambda implementation: {"heldout_loss": (losses[implementation], "nat/byte")})
    )
    assert results(sqlite_store)["learns"] is expected
    assert results(sqlite_store, "1x-h100")["learns"] is expected, "the same kernels"


@pytest.mark.parametrize(
    ("nsa", "dense", "expected"),
    [
        (98.5, 100.0, (GO, GO)),
        (97.5, 100.0, (NO_GO, GO)),  # more than 2 points below dense attention
        (1.6, 1.6, (GO, NO_GO)),  # equal, because neither has learned anything
    ],
)
@pytest.mark.parametrize("lengths", [(2048, 8192), (2048,)])
def test_recall_is_held_against_dense_attention_and_against_chance(
    sqlite_store: Store, sweep, nsa: float, dense: float, expected: tuple[Result, Result], lengths: tuple[int, ...]
) -> None:
    recalls = {"triton": nsa, "dense": dense}
    records = sweep(laws={"triton": 1.0, "dense": 2.0}, lengths=lengths, gpu=H200)
    sqlite_store.apply_many(run_of(records, "needle", "needle-m7c", lambda name: {"recall": (recalls[name], "%")}))
    for hardware in ("1x-h200", "1x-h100"):
        found = results(sqlite_store, hardware)
        both = found["needle-beside-dense"], found["needle-found"]
        unless_whole = tuple(UNKNOWN if each is GO else each for each in expected)
        assert both == (expected if len(lengths) == 2 else unless_whole), "every trained length is needed to pass"
