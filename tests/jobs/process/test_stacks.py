"""Stacks, also of a process that py-spy cannot read; within a bound, also where py-spy is stuck."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs.process import post_mortem

COMPILING = """
import time
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from jobs.process import post_mortem
from kernel import copy

def stuck_here():
    print("there", flush=True)
    time.sleep(600)

post_mortem.offer_stacks()
source = ASTSource(copy, signature={"x": "*fp32", "y": "*fp32"}, constexprs={})
compile(source, target=GPUTarget("cuda", 80, 32))
stuck_here()
"""

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def copy(x, y):
    tl.store(y, tl.load(x))
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a module `kernel`, in which nothing has been compiled yet."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return tmp_path


def test_a_process_that_has_compiled_a_kernel_still_writes_its_stacks(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM, by which Triton compiles, takes signals for itself. The stacks are there where py-spy fails, as it did with
    a panic of its own."""
    (kernel / "py-spy").write_text("#!/bin/sh\necho 'std::rt::lang_start'; exit 101\n")
    (kernel / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", str(kernel), prepend=os.pathsep)
    with (kernel / "stderr").open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", COMPILING], stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n", (kernel / "stderr").read_text()
        [text] = post_mortem.dumps([psutil.Process(process.pid)])
        assert "lang_start" in text
        assert "in stuck_here" in text
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
