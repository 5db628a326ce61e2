"""Runs *_interpreted.py in processes of their own: Triton decides at its first import whether it interprets."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(map(str, {*HERE.glob("*_interpreted.py")} - {Path(__file__)}))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU: see tests/gpu")
def test_kernels_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
