"""Gradients of the token embedding repeat their bits under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsa_core.model import TokenEmbedding


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Two threads, which could add to one row in either order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_its_gradient_is_exact_and_the_same_in_each_compiled_step() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(50, (2, 20_000), generator=generator)
    dout = torch.randn(2, 20_000, 32, generator=generator)
    layer = TokenEmbedding(50, 32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def gradient() -> Tensor:
        return torch.autograd.grad(compiled(tokens), layer.weight, dout)[0]

    torch.testing.assert_close(compiled(tokens), layer(tokens), rtol=0, atol=0)
    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(5))
    exact = torch.zeros(50, 32, dtype=torch.float64).index_add_(0, tokens.flatten(), dout.flatten(0, 1).double())
    torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(torch.autograd.grad(layer(tokens), layer.weight, dout)[0], first)
