"""Under torch.compile a training step is one graph, with the results of eager mode."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from nsa_core import NSAConfig, routes
from nsa_core._decorators import constant
from nsa_core.backends import flash
from nsa_core.model import PRESETS, NSATransformer, TokenEmbedding

TINY = replace(PRESETS["tiny"], layers=2)


def losses_and_gradients(model: NSATransformer, compiled: bool) -> tuple[list[torch.Tensor], list[routes.BranchRun]]:
    torch.compiler.reset()
    tokens = torch.randint(256, (2, 60), generator=torch.Generator().manual_seed(0))
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    with routes.capture() as runs:
        loss = call(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], runs


def test_a_training_step_is_one_graph_and_the_same_step() -> None:
    """Checkpointed; of dense attention: tests/jobs/test_train.py."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = NSATransformer(replace(TINY, layers=1, checkpointing=True)).train()
        results.append(losses_and_gradients(model, compiled))
    (expected, ran), (actual, noted) = results
    assert noted == ran, "tracing notes what runs"
    assert len(expected) == len(list(model.parameters())) + 1
    for ours, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-6)


def test_branches_by_different_backends_under_autocast_are_one_graph_too() -> None:
    """Each branch is computed once, although torch.compile treats two names of one module as two keys of a dict."""
    backend = {"cmp": "chunked", "slc": "naive", "win": "chunked", "select": "chunked"}
    small = NSAConfig(cmp_block=8, cmp_stride=4, slc_block=8, slc_count=4, window=16)
    torch.manual_seed(0)
    model = NSATransformer(replace(TINY, layers=1, nsa=small, backend=backend)).train()
    with torch.autocast("cpu", torch.bfloat16):
        (expected, *_), ran = losses_and_gradients(model, compiled=False)
        (actual, *_), noted = losses_and_gradients(model, compiled=True)
    assert noted == ran
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """They could add to one row in either order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_embeddings_gradient_is_exact_and_the_same_in_each_compiled_step() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, 20_000), generator=generator)
    dout = torch.randn(2, 20_000, 32, generator=generator)
    layer = TokenEmbedding(50, 32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(compiled(tokens), layer.weight, dout)[0]

    torch.testing.assert_close(compiled(tokens), layer(tokens), rtol=0, atol=0)
    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(5))
    exact = torch.zeros(50, 32, dtype=torch.float64).index_add_(0, tokens.flatten(), dout.flatten(0, 1).double())
    torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.autograd.grad(layer(tokens), layer.weight, dout)[0], first)


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
