"""A Triton that the kernels were not run with, or that lacks what they use: `auto` falls back, everything says why."""

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import triton_choice

from jobs.schema.point import Machine
from jobs.specs.fit import backend_reasons
from nsa_core import available_backends
from nsa_core.backends import default, resolve
from nsa_core.backends.triton import Heads, triton_problem, triton_version
from nsa_core.errors import BackendError
from orchestrator.cli import doctor

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_with_a_tested_version_auto_takes_the_kernels() -> None:
    found = triton_choice.look()
    assert (found["auto"], found["reason"], found["job"]) == ("triton", None, None)
    assert found["fused training"]
    assert found["predicts"]
    assert found["doctor"][0] == "ok"
    assert "tested: 3.6 to 3.9; auto takes it" in found["doctor"][1]
    assert "named" not in found


def _falls_back(found: dict[str, Any], reason: str) -> None:
    """Assert that `auto` takes chunked, and that everything says why."""
    assert found["auto"] == "chunked"
    assert reason in found["reason"]
    assert not found["fused training"]
    assert not found["predicts"]
    assert found["named"].startswith("backend: 'triton': ")
    assert reason in found["named"]
    assert "use one of auto, reference, naive, chunked" in found["named"]
    assert found["doctor"][0] == "missing"
    assert "auto takes chunked instead: " in found["doctor"][1]
    assert reason in found["doctor"][1]


def test_a_newer_version_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "3.10.1" if name == "triton" else installed(name))
    triton_problem.cache_clear()
    try:
        found = triton_choice.look()
    finally:
        triton_problem.cache_clear()
    reason = "Triton 3.10.1 is untested, the kernels were run with 3.6 to 3.9: pip install"
    _falls_back(found, reason)
    assert f"A100: {reason}" in found["job"]


def test_a_version_that_lacks_a_symbol_of_an_import_is_not_taken(tmp_path: Path) -> None:
    """In a process that has imported no kernel yet. Of the job, the host's own probe tells (test_bad_specs.py)."""
    rename = "import triton.experimental.gluon.language.nvidia.hopper as hopper\ndel hopper.warpgroup_mma\n"
    (tmp_path / "sitecustomize.py").write_text(rename)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "triton_choice"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _falls_back(json.loads(done.stdout.splitlines()[-1]), "(ImportError: cannot import name 'warpgroup_mma'")


@pytest.mark.parametrize(
    ("capability", "supported"),
    [((8, 0), True), ((9, 0), True), ((8, 6), False), ((8, 9), False), ((10, 0), False), ((12, 0), False)],
)
def test_the_kernels_run_on_gpus_that_they_are_made_for(monkeypatch, capability, supported) -> None:
    """Elsewhere tiles exceed the shared memory, or a product's rows lie otherwise than late rescaling assumes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    cuda, described = torch.device("cuda"), "{}.{}".format(*capability)
    fingerprint = {"capability": described, "triton": triton_version() or ""}
    reasons = [
        available_backends(cuda, torch.bfloat16)["triton"],
        backend_reasons(Machine("cuda", "a card", 80 * 2**30, fingerprint), torch.bfloat16, Heads(64, 2))["triton"],
    ]
    said = f"its kernels are for GPUs of compute capability 8.0 and 9.0, this one has {described}"
    assert reasons == [None if supported else said] * 2
    assert default(cuda, torch.bfloat16) == ("triton" if supported else "chunked")
    if not supported:
        with pytest.raises(BackendError, match=f"{said}; use one of auto, "):
            resolve("triton", ["win"], cuda, torch.bfloat16)
        assert doctor._triton().detail == f"auto takes chunked instead: {said}"


def test_amds_gpus_are_not_taken_for_hopper(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert triton_problem.__wrapped__() == "its kernels are for NVIDIA's GPUs, and this PyTorch is for AMD's"
