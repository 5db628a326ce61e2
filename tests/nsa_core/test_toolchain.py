"""A Triton that the kernels were not run with, or that lacks what they use: `auto` falls back, everything says why.

Each process finds another installation on its path, and is asked what it chooses on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.schema.point import Machine
from jobs.specs.fit import backend_reasons
from nsa_core import available_backends
from nsa_core.backends import default, resolve
from nsa_core.backends.triton import Heads, triton_problem, triton_version
from nsa_core.errors import BackendError
from orchestrator.cli import doctor

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

LOOK = """
import json, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from jobs.specs.fit import backend_reasons
from jobs.schema.point import Machine
from nsa_core import available_backends
from nsa_core.backends import default, resolve
from nsa_core.backends.triton import Heads, triton_problem, triton_version
from nsa_core.errors import BackendError
from nsa_core.memory import predicts
from nsa_core.projections import in_compiled_training
from orchestrator.cli import doctor
from orchestrator.settings import Settings

CUDA, HALF = torch.device("cuda"), torch.bfloat16
found = {"auto": default(CUDA, HALF), "reason": available_backends(CUDA, HALF)["triton"]}
found["predicts"] = predicts("triton")
try:
    resolve("triton", ("cmp", "slc", "win", "select"), CUDA, HALF)
except BackendError as err:
    found["named"] = str(err)

torch.compiler.is_compiling = lambda: True
with FakeTensorMode():
    found["fused training"] = in_compiled_training(torch.empty(4, 4, dtype=HALF, device=CUDA))
machine = Machine("cuda", "A100", 80 * 2**30, {"capability": "8.0", "triton": triton_version() or ""})
found["job"] = backend_reasons(machine, HALF, Heads(64, 2))["triton"]
found["doctor"] = {one.name: [str(one.health), one.detail] for one in doctor.findings(Settings())}["triton"]
print(json.dumps(found))
"""
RENAMED_AT_IMPORT = "import triton.experimental.gluon.language.nvidia.hopper as hopper\ndel hopper.warpgroup_mma\n"


@dataclass(frozen=True)
class Installation:
    """Files ahead of the real packages on a process's path, and the reason that the kernels are refused with."""

    files: dict[str, str]
    reason: str
    shows_in_metadata: bool = True


INSTALLATIONS = {
    "a newer version": Installation(
        {"triton-3.10.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: triton\nVersion: 3.10.1\n"},
        "Triton 3.10.1 is untested, the kernels were run with 3.6 to 3.9: pip install",
    ),
    "a symbol of an import renamed": Installation(
        {"sitecustomize.py": RENAMED_AT_IMPORT},
        "(ImportError: cannot import name 'warpgroup_mma'",
        shows_in_metadata=False,
    ),
}


def look(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    """Run LOOK in a process that finds `files` first."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "NSA_HOME": str(folder / "home")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_with_a_tested_version_auto_takes_the_kernels(tmp_path: Path) -> None:
    found = look(tmp_path, {})
    assert (found["auto"], found["reason"], found["job"]) == ("triton", None, None)
    assert found["fused training"]
    assert found["predicts"]
    assert found["doctor"][0] == "ok"
    assert "tested: 3.6 to 3.9; auto takes it" in found["doctor"][1]
    assert "named" not in found


@pytest.mark.parametrize("given", INSTALLATIONS.values(), ids=INSTALLATIONS)
def test_auto_falls_back_to_chunked_and_everything_says_why(given: Installation, tmp_path: Path) -> None:
    found = look(tmp_path, given.files)
    assert found["auto"] == "chunked"
    assert given.reason in found["reason"]
    assert not found["fused training"]
    assert not found["predicts"]
    assert found["named"].startswith("backend: 'triton': ")
    assert given.reason in found["named"]
    assert "use one of auto, reference, naive, chunked" in found["named"]
    assert found["doctor"][0] == "missing"
    assert "auto takes chunked instead: " in found["doctor"][1]
    assert given.reason in found["doctor"][1]
    if given.shows_in_metadata:  # else the host's own probe tells (tests/jobs/test_bad_specs.py)
        assert f"A100: {given.reason}" in found["job"]


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
