"""A run that is measured again stays evidence while each of its points has an outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.schema.states import PointState, Result, RunState
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import evaluate
from orchestrator.store import Store
from orchestrator.store.records import OutcomeRecord, PointRecord

RULES = """
targets:
  - name: t
    title: t
    rules:
      - {rule: time, title: time, kind: metric, metric: time, unit: ms, at_most: 1000, every: true, measure: run it}
      - {rule: states, title: states, kind: states, none_of: [error], measure: run it}
"""


@pytest.mark.parametrize("state", [None, RunState.CANCELLED, RunState.FAILED])
def test_it_is_complete_while_its_outcomes_count(
    sqlite_store: Store, sweep, tmp_path: Path, state: RunState | None
) -> None:
    (tmp_path / "gates.yaml").write_text(RULES)
    gates = load_gates(tmp_path / "gates.yaml")
    records = sweep("run")
    sqlite_store.apply_many(records)
    [before] = evaluate(sqlite_store, gates)
    assert before.result is Result.GO
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
    assert [rule.result for rule in after.rules] == [Result.UNKNOWN, Result.NO_GO]
