"""Points under several environments and interpreters, and the search for what reads a variable."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.drill import Spec
from jobs.hardware import variables
from jobs.schema.point import Machine
from jobs.specs.environments import env_text
from jobs.specs.spec import parse_spec

CPU = Machine("cpu", "processor", 2**33, {"torch": "2.13"})
OTHER = Machine("cpu", "processor", 2**33, {"torch": "2.11"})
SPEC = {"kind": "drill", "name": "t", "behaviours": ["ok", "slow"]}


def test_a_spec_without_environments_has_its_points_as_they_are() -> None:
    spec = parse_spec(SPEC)
    assert spec.all_points({None: CPU}) == list(spec.points(CPU))
    assert spec.settings == []


def test_a_spec_is_kept_as_before_unless_it_names_environments_or_interpreters() -> None:
    plain = parse_spec(SPEC)
    assert plain.model_dump(mode="json").keys() & {"env", "python"} == set()
    assert parse_spec({**SPEC, "env": {}, "python": None}) == plain
    under = parse_spec({**SPEC, "env": {"TORCH_LOGS": "x"}, "python": "/b"})
    kept = under.model_dump(mode="json")
    assert (kept["env"], kept["python"]) == ([{"TORCH_LOGS": "x"}], ["/b"])
    assert parse_spec(kept) == under
    assert under.model_dump(include={"seed"}) == {"seed": 0}


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


def test_a_single_environment_needs_no_mark_in_the_label_but_is_part_of_the_key() -> None:
    (plain, _), (under, _) = (
        parse_spec({**SPEC, **more}).all_points({None: CPU}) for more in ({}, {"env": {"TORCH_LOGS": "dynamo"}})
    )
    assert (under.label, under.axes.env) == ("ok", "TORCH_LOGS=dynamo")
    assert plain.key("code", CPU) != under.key("code", CPU)
    assert replace(plain, python="/a").key("code", CPU) != replace(plain, python="/b").key("code", CPU)


def test_points_of_an_interpreter_are_planned_for_the_machine_that_it_finds(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(Spec, "points", lambda self, machine: seen.append(machine) or [])
    parse_spec({**SPEC, "python": [None, "/b"]}).all_points({None: CPU, "/b": OTHER})
    assert seen == [CPU, OTHER]


def test_a_name_is_found_as_a_whole_word_only() -> None:
    assert variables.occurs("TORCH_LOGS")
    assert variables.occurs("MALLOC_ARENA_MAX")  # read by the C library, which is no package
    assert not variables.occurs("PYTORCH_CUDA_ALLOC_CON")


@pytest.mark.parametrize("text", [b"NAME", b"x NAME y", b"NAMES NAME", b"A_NAME NAMEX\0NAME"])
@pytest.mark.parametrize("absent", [b"", b"NAM", b"NAMES", b"A_NAME xNAME NAME_B"])
def test_a_word_is_found_wherever_the_chunks_of_a_file_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, absent: bytes
) -> None:
    file, word = tmp_path / "library.so", re.compile(rb"(?<!\w)NAME(?!\w)")
    for size in range(5, 24):
        monkeypatch.setattr(variables, "_CHUNK_BYTES", size)
        file.write_bytes(absent + b".")
        assert not variables._contains(file, b"NAME", word), size
        file.write_bytes(absent + b" " + text + b" " * (size + 1))
        assert variables._contains(file, b"NAME", word), size


@pytest.mark.parametrize(
    ("name", "device", "gpus", "reason"),
    [
        ("CUDA_LAUNCH_BLOCKING", "cpu", 0, "it concerns GPUs, and the points run on the CPU"),
        ("PYTORCH_CUDA_ALLOC_CONF", "cpu", 0, "it concerns GPUs"),
        ("PYTORCH_ALLOC_CONF", "cpu", 0, "it concerns GPUs"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "cpu", 0, "it concerns GPUs"),
        ("NCCL_DEBUG", "cuda", 1, "NCCL is not used by a point with one GPU"),
        ("CUDA_LAUNCH_BLOCKING", "cuda", 1, None),
        ("CUDA_MODULE_LOADING", "cuda", 1, None),
        ("ATEN_CPU_CAPABILITY", "cpu", 0, None),
        ("TORCHINDUCTOR_CACHE_DIR", "cpu", 0, None),
        ("TORCHINDUCTOR_CASHE_DIR", "cpu", 0, "nothing in the installed PyTorch, .* reads a variable of this name"),
    ],
)
def test_a_variable_that_cannot_have_an_effect_has_a_reason(
    name: str, device: str, gpus: float, reason: str | None
) -> None:
    found = variables.refusal(name, device, gpus)
    assert (found is None) if reason is None else re.match(reason, str(found))


def test_effective_values_are_read_where_they_take_effect(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    names = ["ATEN_CPU_CAPABILITY", "MALLOC_ARENA_MAX", "TORCH_LOGS"]
    assert variables.effective(names) == {
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability(),
        "MALLOC_ARENA_MAX": "3",
        "TORCH_LOGS": "unset",
    }
