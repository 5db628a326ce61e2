"""A spec as a run stores it: read back, its points have the same keys, else a resume would measure them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import jobs
from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from jobs.specs.spec import JobSpec, SpecError
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
