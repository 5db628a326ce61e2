"""The executor for this machine: how many points it starts at a time."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from orchestrator.execute import local
from orchestrator.execute.local import LocalExecutor
from orchestrator.execute.room import MOST_A_CORE

CPU = Machine("cpu", "test processor", 8 << 30, {"torch": "0"})


def executor(monkeypatch: pytest.MonkeyPatch, **resources: Any) -> LocalExecutor:
    """An executor on two cores."""
    monkeypatch.setattr(local, "_cpus", lambda: 2)
    spec = {"kind": "train", "name": "t", "device": "cpu", "seq_len": 32, "steps": 20, "batch": 1}
    return LocalExecutor(parse_spec({**spec, "resources": resources}))


@pytest.mark.parametrize(
    ("resources", "slots"),
    [
        ({"num_cpus": 1e-4}, 2 * MOST_A_CORE),
        ({"num_cpus": 1e-4, "workers": 5}, 5),
        ({"num_cpus": 0.5}, 4),
        ({"num_cpus": 2}, 1),
    ],
)
def test_a_tiny_share_of_a_core_does_not_start_thousands_of_points(monkeypatch, resources, slots) -> None:
    assert executor(monkeypatch, **resources).slots(CPU) == slots
