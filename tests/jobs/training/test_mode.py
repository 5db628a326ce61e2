"""The mode of a training is in its points' axes, also of journals that have it in the configuration only."""

from __future__ import annotations

from pathlib import Path

import pytest

import jobs
from jobs.schema.point import Machine
from jobs.specs.load import load_spec
from orchestrator.store.records import PointRecord

CONFIGS = Path(jobs.__file__).parent / "configs"
OLD = {"optimizer": {}, "steps": 9, "batch": 4, "compile": True, "model": {"checkpointing": True}}


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (OLD, {"compile": "on", "cuda_graphs": "off", "checkpointing": "on", "steps": 9}),
        (
            OLD | {"cuda_graphs": True, "ranks": {"ranks": 2, "parallel": "ddp", "micro_batch": 2}},
            {"cuda_graphs": "on", "ranks": 2, "parallel": "ddp", "micro_batch": 2},
        ),
        (OLD | {"layout": {"ranks": 1, "parallel": "ddp", "micro_batch": 4}}, {"ranks": None, "micro_batch": None}),
        ({"steps": 9}, {"compile": None, "steps": None}),
    ],
)
def test_the_mode_of_an_older_journal_is_that_of_its_configuration(config: dict, mode: dict):
    record = PointRecord(run_id="r", point_id="r/0", index=0, key="k", label="l", config=config, axes={})
    assert {name: record.axes.get(name) for name in mode} == mode


@pytest.mark.parametrize("name", ["train_smoke", "soak_smoke", "needle_smoke", "diagnose_smoke"])
def test_every_training_says_its_mode(name: str):
    points = load_spec(CONFIGS / f"{name}.yaml").points(Machine("cpu", "test processor", 8 * 2**30))
    assert all({"compile", "cuda_graphs", "checkpointing", "steps"} <= point.axes.more.keys() for point in points)
