"""Runs each *_interpreted.py in a process of its own: Triton decides at its first import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU: see tests/gpu")
@pytest.mark.parametrize(
    "name", ["decode_interpreted.py", "kernels_interpreted.py", "merge_interpreted.py", "training_interpreted.py"]
)
def test_kernels_in_tritons_interpreter(name: str) -> None:
    file = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
