"""Points under environment variables on a CUDA device: effective values read in the child, ineffective ones refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs.specs.spec import Deadlines

ROOT = Path(__file__).resolve().parents[2]
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def run(folder: Path, *envs: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """The driver's end and the outcomes of one trivial point on the GPU under each environment."""
    spec = folder / "spec.yaml"
    content = {"kind": "drill", "name": "t", "behaviours": ["ok"], "device": "cuda", "env": list(envs)}
    spec.write_text(json.dumps(content | {"deadlines": Deadlines(startup_s=120).model_dump()}))
    inherited = {name: value for name, value in os.environ.items() if name not in (ALLOCATOR, "PYTORCH_ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-m", "jobs", str(spec), "--local"],
        cwd=ROOT,
        env=inherited | {"NSA_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
    )
    lines = [line for file in folder.glob("home/artifacts/*/journal.jsonl") for line in file.read_text().splitlines()]
    return done, [record for record in map(json.loads, lines) if record["type"] == "outcome"]


def test_three_allocator_settings_have_three_effective_values(tmp_path: Path) -> None:
    segments, split = {ALLOCATOR: "expandable_segments:True"}, {ALLOCATOR: "max_split_size_mb:128"}
    done, outcomes = run(tmp_path, {}, segments, split)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, expandable, limited = (outcome["environment"]["settings"][ALLOCATOR] for outcome in outcomes)
    assert "expandable_segments=False" in plain
    assert "expandable_segments=True" in expandable
    assert f"max_split_size={128 * 2**20}" in limited
    assert len({plain, expandable, limited}) == 3


def test_blocking_launches_are_seen_by_their_duration(tmp_path: Path) -> None:
    done, outcomes = run(tmp_path, {}, {"CUDA_LAUNCH_BLOCKING": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    effective = [outcome["environment"]["settings"]["CUDA_LAUNCH_BLOCKING"] for outcome in outcomes]
    assert effective == ["asynchronous", "blocking"]


def test_settings_without_effect_are_refused_by_name(tmp_path: Path) -> None:
    ineffective = {
        ALLOCATOR: "expandable_segments:False",
        "CUDA_LAUNCH_BLOCKING": "0",
        "NCCL_DEBUG": "INFO",
    }
    done, outcomes = run(tmp_path, ineffective)
    assert (done.returncode, outcomes) == (2, [])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in lines] == [f"env.{name}" for name in ineffective]
    for line, reason in zip(lines, ("is in effect as well", "is in effect", "one GPU"), strict=True):
        assert reason in line
    assert "Traceback" not in done.stderr


def test_a_value_that_the_allocator_rejects_is_refused(tmp_path: Path) -> None:
    done, outcomes = run(tmp_path, {ALLOCATOR: "no_such_option:1"})
    assert (done.returncode, outcomes) == (2, []), done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: env.{ALLOCATOR}: 'no_such_option:1': ")
