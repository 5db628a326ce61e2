"""Stacks that a process writes when it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import wait_for

from jobs.process import stacks

COMPILING = """
import time
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from jobs.process import stacks
from kernel import copy

def stuck_here():
    print("there", flush=True)
    time.sleep(600)

stacks.offer()
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


def test_a_process_that_has_compiled_a_kernel_still_tells_its_stacks(kernel: Path) -> None:
    """LLVM, by which Triton compiles, takes signals for itself."""
    told = kernel / "told"
    with (
        told.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(COMPILING)], stdout=subprocess.PIPE, stderr=file
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n", told.read_text()
        try:
            assert stacks.ask(process.pid)
            wait_for(lambda: "in stuck_here" in told.read_text(), 20)
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_that_offers_none_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not stacks.ask(process.pid)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
        finally:
            process.kill()
    assert not stacks.ask(process.pid), "it is gone"
