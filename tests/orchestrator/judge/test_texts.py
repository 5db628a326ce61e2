"""Losses are compared only where both trainings read the same text: files may be edited between two points of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.schema.states import Result
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import RuleVerdict, evaluate
from orchestrator.store import Store
from orchestrator.store.records import MetricData, OutcomeRecord, Record

RULES = """
targets:
  - name: t
    title: t
    rules:
      - rule: learns
        title: learns
        kind: ratio
        numerator: {{metric: {metric}, where: {{implementation: [triton]}}}}
        denominator: {{metric: {metric}, where: {{implementation: dense}}}}
        at_most: 1.02
        measure: run it
"""
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
        (tmp_path / "gates.yaml").write_text(RULES.format(metric=metric))
        [target] = evaluate(sqlite_store, load_gates(tmp_path / "gates.yaml"))
        return target.rules[0]

    return judge


@pytest.mark.parametrize("other", [BYTES | {"sha256": "dd"}, TOKENS])
def test_losses_on_different_texts_are_not_compared(judged, other: dict) -> None:
    judged(BYTES, BYTES, run="old")
    verdict = judged(BYTES, other, run="r")
    assert (verdict.result, verdict.value, verdict.run_id) == (Result.UNKNOWN, None, "r")
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
    assert judged(nsa, dense).result is Result.GO


def test_speed_is_compared_on_any_text(judged) -> None:
    assert judged(BYTES, TOKENS, metric="throughput", unit="1").result is Result.GO
