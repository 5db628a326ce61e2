"""The mode of a training is in its points' axes, also where a journal has it in the configuration only."""

from __future__ import annotations

import pytest

from orchestrator.store.records import PointRecord

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
