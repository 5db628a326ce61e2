"""Errors of make targets that cannot work on this host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize("target", ["bench", "test-gpu"])
def test_without_a_gpu_nothing_is_started_and_the_error_names_the_fix(target: str, tmp_path: Path) -> None:
    command = ["make", target, f"BIN={Path(sys.executable).parent}", "RUN=", "DEV="]  # the environment is this one
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the make that runs the tests
    env = {name: value for name, value in os.environ.items() if name not in of_make}
    env["NSA_HOME"] = str(tmp_path / "home")
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "error: device: PyTorch sees no CUDA device here; run this on a GPU host" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "home").exists()
