"""History of cells: what the committed journals say, a planted slowdown, a creeping one, and what looks like one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nsa_command import nsa

from orchestrator.cli.commands import reference_data
from orchestrator.report.compare import Change
from orchestrator.report.history import History, histories
from orchestrator.store import Store, importer
from orchestrator.store.journal import read
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, Record, RunEndRecord, RunRecord

JOURNALS = {path.name.removesuffix(".jsonl.gz"): path for path in reference_data() if path.name.endswith(".jsonl.gz")}
FIRST, EXACT, SLOW, LAST = (
    next(path for name, path in JOURNALS.items() if name.endswith(end)) for end in ("90ba", "3582", "9edf", "cf10")
)
SLOWER, CREEPING = {"query_heads": 32, "seq_len": 8192}, {"query_heads": 64, "seq_len": 2048}


@pytest.fixture
def reference(sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A database of four committed runs: three commits, the second also with exact slots."""
    for path in (FIRST, EXACT, SLOW, LAST):
        importer.import_file(sqlite_store, path)
    monkeypatch.setenv("NSA_DATABASE_URL", f"sqlite:///{tmp_path / 'nsa.db'}")
    return sqlite_store


def test_the_committed_runs_have_the_change_that_is_in_them_and_its_doubts(reference: Store) -> None:
    found = histories(reference, words=("triton", "forward", "12/2", "2048", "slots=packed"))
    assert [[reading.commit for reading in each.readings] for each in found] == [["f176e3e", "45fd17d", "535d8e5"]]
    slower, faster = found[0].changes
    assert (slower.before.commit, slower.after.commit, slower.change) == ("f176e3e", "45fd17d", Change.WORSE)
    assert slower.ratio == pytest.approx(1.109, abs=0.001)
    said = "may be noise: 1 run before it and 2 after, its best tenth did not change, 535d8e5 took it back"
    assert slower.doubt == said
    assert faster.doubt.endswith("f176e3e had it before")


def test_a_command_lists_the_changes_and_the_readings_of_few_cells(reference: Store) -> None:
    done = nsa("history", "triton", "forward", "12/2", "2048", "--format", "md")
    assert done.code == 0
    assert "| 12/2 d64, slots=packed | 2048 | 16 | 0.8302 ms (f176e3e) | 0.9301 ms (45fd17d) | 1.109 |" in done.out
    assert "| 2026-11-25 13:54 | 45fd17d | 20261125-135408-bench-9edf | 0.9301 ms |" in done.out
    compare = "nsa compare 20261125-135408-bench-9edf 20261128-134541-bench-cf10 --metric time"
    assert compare in done.out, "its newest change"
    assert nsa("history", "triton", "nonsense").err.startswith("error: WORDS: 'triton nonsense': no cell ")
    assert nsa("history", "triton", "--metric", "nonsense").err.startswith("error: --metric: 'nonsense': no cell ")


def planted(path: Path, run: int, random: np.random.Generator) -> Iterator[Record]:
    """A journal's records of Triton as those of a later run, 0.4 % off; from the seventh run on one shape is 3 %
    slower, another one gets 0.7 % slower with each run; the driver changes with the fourth."""
    names: dict[str, float] = {}
    for record in read(path):
        ids: dict[str, Any] = {"run_id": f"run-{run}", "at": record.at + timedelta(days=run)}
        if point_id := getattr(record, "point_id", None):
            ids["point_id"] = point_id.replace(record.run_id, f"run-{run}")
        if isinstance(record, RunRecord):
            yield record.model_copy(update=ids | {"git_commit": f"{run:x}" * 40, "git_dirty": False})
        elif isinstance(record, PointRecord) and record.axes["implementation"] == "triton":
            factor = np.exp(random.normal(0, 0.004))
            is_slower = run >= 6 and all(record.axes[axis] == value for axis, value in SLOWER.items())
            creeps = all(record.axes[axis] == value for axis, value in CREEPING.items())
            names[record.point_id] = factor * (1.03 if is_slower else 1.007**run if creeps else 1.0)
            yield record.model_copy(update=ids)
        elif isinstance(record, OutcomeRecord) and record.point_id in names:
            times = [metric.samples[:40] for metric in record.metrics if metric.name == "time"]
            values = tuple(names[record.point_id] * each for samples in times for each in samples)
            median = (
                [MetricData(name="time", unit="ms", value=float(np.median(values)), samples=values)] if values else []
            )
            gpu = dict(record.environment["gpu"]) | {"driver": "580" if run < 3 else "590"}
            yield record.model_copy(
                update=ids | {"metrics": (*median,), "environment": {**record.environment, "gpu": gpu}}
            )
        elif isinstance(record, RunEndRecord):
            yield record.model_copy(update=ids)


def test_a_planted_slowdown_of_3_percent_and_a_creeping_one_are_found_and_nothing_else(sqlite_store: Store) -> None:
    random = np.random.default_rng(7)
    for run in range(10):
        sqlite_store.apply_many(list(planted(FIRST, run, random)))
    found = histories(sqlite_store, words=("forward",))
    changed = [each for each in found if any(not change.doubt for change in each.changes)]
    assert len(found) > 10
    assert {shape(each) for each in changed} == {(32, 8192), (64, 2048)}
    [step], [slow] = (each.changes for each in sorted(changed, key=shape))
    assert (step.before.run_id, step.after.run_id, step.change) == ("run-5", "run-6", Change.WORSE)
    assert step.ratio == pytest.approx(1.03, abs=0.006)
    assert slow.creeping
    assert (slow.before.run_id, slow.after.run_id) == ("run-0", "run-9")
    tools = [reading.tools["driver"] for reading in changed[0].readings]
    assert tools == ["580"] * 3 + ["590"] * 7


def shape(history: History) -> tuple[int, int]:
    values = dict(history.cell)
    return int(values["query_heads"]), int(values["seq_len"])
