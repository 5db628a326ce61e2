"""Points under several environments and interpreters."""

from __future__ import annotations

import torch

from jobs.hardware import variables
from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from jobs.specs.spec import env_text

CPU = Machine("cpu", "processor", 2**33, {"torch": "2.13"})
OTHER = Machine("cpu", "processor", 2**33, {"torch": "2.11"})
SPEC = {"kind": "drill", "name": "t", "behaviours": ["ok", "slow"]}


def test_every_point_is_planned_under_each_interpreter_and_environment() -> None:
    long = {"TORCH_LOGS": "x" * 80}
    spec = parse_spec({**SPEC, "python": [None, "/opt/b/python"], "env": [{}, {"TRITON_B": "1", "OMP_A": "2 3"}, long]})
    points = spec.all_points({None: CPU, "/opt/b/python": OTHER})
    assert [point.label for point in points[:6]] == [
        *("ok", "slow", "ok [OMP_A='2 3' TRITON_B=1]", "slow [OMP_A='2 3' TRITON_B=1]", "ok [env 2]", "slow [env 2]")
    ]
    assert [point.label for point in points[6:9]] == [
        *("ok [/opt/b/python]", "slow [/opt/b/python]", "ok [/opt/b/python] [OMP_A='2 3' TRITON_B=1]")
    ]
    assert [(point.env, point.python) for point in points[2:4]] == [({"TRITON_B": "1", "OMP_A": "2 3"}, None)] * 2
    assert (points[0].axes.env, points[2].axes.env) == (None, "OMP_A='2 3' TRITON_B=1")
    assert {point.axes.python for point in points[6:]} == {"/opt/b/python"}
    assert spec.settings == ["OMP_A", "TORCH_LOGS", "TRITON_B"]
    assert len({point.key("code", CPU) for point in points}) == len(points) == 12


def test_different_environments_never_have_the_same_text() -> None:
    one, two = {"OMP_A": "1 OMP_B=2"}, {"OMP_A": "1", "OMP_B": "2"}
    assert [env_text(env) for env in (one, two, {"OMP_A": ""})] == ["OMP_A='1 OMP_B=2'", "OMP_A=1 OMP_B=2", "OMP_A=''"]
    assert len(parse_spec({**SPEC, "env": [one, two]}).env) == 2


def test_effective_values_are_read_where_they_take_effect(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    names = ["ATEN_CPU_CAPABILITY", "MALLOC_ARENA_MAX", "TORCH_LOGS"]
    assert variables.effective(names) == {
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability(),
        "MALLOC_ARENA_MAX": "3",
        "TORCH_LOGS": "unset",
    }
