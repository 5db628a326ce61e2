"""A spec as a run stores it: read back, its points have the same keys, else a resume would measure them again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import jobs
from jobs.hardware import variables
from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from jobs.specs.spec import JobSpec, SpecError, env_text
from nsa_core import memory
from nsa_core.memory import MemoryEstimate

MACHINES = {
    "cpu": Machine("cpu", "test processor", 64 * 2**30),
    "cuda": Machine("cuda", "NVIDIA H200", 140 * 2**30, {"capability": "9.0"}),
}
READY = sorted((Path(jobs.__file__).parent / "configs").glob("*.yaml"))


def keys(spec: JobSpec) -> list[str]:
    machine = MACHINES["cpu" if spec.device == "cpu" else "cuda"]
    return [point.key("code", machine) for point in spec.all_points(dict.fromkeys(spec.python, machine))]


def variants(data: dict[str, Any]) -> Iterator[JobSpec]:
    """The spec, and of a kind's small one the same without each field that may be left out."""
    yield parse_spec(data)
    for name in data if data["name"].endswith("smoke") else ():
        try:
            yield parse_spec({key: value for key, value in data.items() if key != name})
        except SpecError:
            continue


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_a_stored_spec_has_the_points_of_the_one_submitted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory = MemoryEstimate(0, 0, 0, 0, 0, 0)  # what is predicted is in no key, and takes seconds
    monkeypatch.setattr(memory, "_along_tokens", lambda *_: no_memory)
    for spec in variants(yaml.safe_load(path.read_text())):
        stored = parse_spec(json.loads(json.dumps(spec.model_dump(mode="json"))))
        assert stored == spec
        try:
            submitted = keys(spec)
        except SpecError:  # a backend without this machine's packages, say
            continue
        assert keys(stored) == submitted
        assert len(set(submitted)) == len(submitted)


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
