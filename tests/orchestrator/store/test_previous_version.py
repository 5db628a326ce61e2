"""A database of version 0.1.0 opens, migrates and shows the figures that version 0.1.0 showed.

`version_0_1_0/` was made by that version (commit 288f849): runs of five kinds on a CPU, the reported tables, verdicts;
`figures.json.xz` is what its views, fits and rules said of it.
"""

from __future__ import annotations

import json
import lzma
import math
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs.schema.quantities import Plot
from jobs.schema.states import Result
from orchestrator.judge import analysis
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import evaluate
from orchestrator.report import report
from orchestrator.store import Store, queries, upgrade

FOLDER = Path(__file__).with_name("version_0_1_0")
SERIES = ("run_id", "implementation", "pass", "workload", "query_heads", "head_dim", "metric")
SUCCESSORS = {"linear-scaling": "linear-scaling/cpu", "m7c-125m-training": "m7c-125m-training/2x-a100"}
VIEWS = {
    **dict.fromkeys(("v_metrics", "v_scaling", "v_throughput", "v_memory"), "point_id, metric"),
    "v_points": "point_id",
    "v_gate": "target, run_id, position",
}


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """The figures of the version that made the database."""
    return json.loads(lzma.decompress((FOLDER / "figures.json.xz").read_bytes()))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The migrated database."""
    path = tmp_path_factory.mktemp("previous") / "nsa.db"
    path.write_bytes(lzma.decompress((FOLDER / "nsa.db.xz").read_bytes()))
    assert upgrade(f"sqlite:///{path}") == ("0002", "0010")
    return path


@pytest.fixture
def store(database: Path):
    with Store.open(f"sqlite:///{database}", create=False, readonly=True) as store:
        yield store


@pytest.mark.parametrize("view", VIEWS)
def test_every_row_of_a_view_is_as_it_was(view: str, database: Path, said: dict[str, Any]):
    expected = said["views"][view]
    assert expected
    with sqlite3.connect(database) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute(f"SELECT * FROM {view} ORDER BY {VIEWS[view]}")]
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected


def test_every_line_through_all_lengths_is_as_it_was(store: Store, said: dict[str, Any]):
    fits = analysis.scaling_fits(queries.scaling(store))
    assert len(fits) == len(said["fits"])
    named = {tuple(fit.series[name] for name in SERIES): fit for fit in fits}
    for before in said["fits"]:
        fit = named[tuple(before[name] for name in SERIES)]
        assert set(fit.point_ids) <= set(before["point_ids"])
        now = {name: _plain(value) for name, value in vars(fit.plain).items()}
        assert {name: _rounded(value) for name, value in now.items()} == {name: _rounded(before[name]) for name in now}


def test_every_rule_of_the_same_name_judges_as_it_did(store: Store, said: dict[str, Any]):
    judged = {target.name: {rule.rule: rule for rule in target.rules} for target in evaluate(store, load_gates())}
    compared = 0
    for target in said["verdicts"]:
        for name, result, value, bound, evidence in target["rules"]:
            rule = judged[SUCCESSORS[target["target"]]][name]
            compared += 1
            if name == "soak-memory-slope":  # no job could measure it then; since kind soak its metric is another
                assert result == rule.result == Result.UNKNOWN
                continue
            assert rule.bound == bound
            if "exponent" in name or "contrast" in name:  # asymptotic since, over the lengths that hold
                assert set(rule.evidence) <= set(evidence)
                continue
            assert (rule.result, rule.evidence) == (result, evidence)
            assert rule.value == pytest.approx(value)
    assert compared > 10


def test_its_runs_declare_their_quantities_now(store: Store):
    runs = queries.runs(store, limit=None).set_index("kind")["run_id"]
    train = queries.quantities(store, [runs["train"]])
    assert train.of("heldout_loss").title == "Held-out loss"
    assert queries.quantities(store, [runs["decode"]]).of("throughput").plot is Plot.STEP_RATE


def test_a_report_of_a_training_shows_what_it_measured(store: Store):
    runs = queries.runs(store, limit=None).set_index("kind")["run_id"]
    text = report(store, [runs["train"]])
    assert all(f" {name} |" in text for name in ("loss", "heldout_loss", "throughput", "planned_time"))


def _rounded(value: Any) -> Any:
    """To nine digits: another build of the linear algebra may differ in the last ones."""
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and (math.isnan(value) or pd.isna(value)) else value
