"""Marks for torch.compile, and the import that they save."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from nsa_core._decorators import constant
from nsa_core.backends import flash


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="its kernels are marked by the compiler")
def test_the_package_does_not_import_the_compiler():
    code = "import sys, nsa_core; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_marked_function_is_run_while_its_caller_is_traced():
    calls: list[int] = []

    @constant
    def width() -> int:
        calls.append(len(calls))
        return 3

    compiled = torch.compile(lambda x: x * width(), backend="eager", fullgraph=True)
    assert [float(compiled(torch.ones(()))) for _ in range(2)] == [3.0, 3.0]
    assert calls == [0]


@pytest.mark.parametrize("left", [None, 31])
def test_pytorchs_window_kernel_is_traced_into_one_graph(left: int | None):
    """It runs on a GPU alone; its graph is made anywhere, also where its module is imported first while tracing."""
    calls: list[int] = []

    def counted(graph: torch.fx.GraphModule, _: object):
        calls.append(sum("varlen" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return lambda *inputs: (torch.zeros(2, 64, 4, 16),)

    q, k, v = torch.randn(3, 2, 64, 4, 16, dtype=torch.bfloat16)
    torch.compile(flash._torch_varlen, backend=counted, fullgraph=True)(q, k[:, :, :2], v[:, :, :2], 0.25, left)
    assert calls == [1]
