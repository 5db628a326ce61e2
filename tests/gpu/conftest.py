"""Marks of all tests that need a GPU; operands of the Triton backend's, and what their results are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nsa_core import NSAConfig, nsa_attention, select_blocks
from nsa_core.backends import BACKENDS
from nsa_core.functional import compress

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Called for the tests of this folder alone."""
    item.add_marker(pytest.mark.gpu)
    item.add_marker(NEEDS_CUDA)


@dataclass
class CudaCall:
    """Tensors of one call on a GPU; `leaves` are those that gradients are computed for."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.gates]

    def to(self, dtype: torch.dtype) -> CudaCall:
        return CudaCall(*(x.detach().to(dtype).requires_grad_() for x in self.leaves))

    def blocks(self, config: NSAConfig, backend: str = "triton") -> Tensor:
        return select_blocks(self.q, self.k, config, backend=backend)

    def run(
        self, config: NSAConfig, backend: str = "triton", towards: Tensor | None = None, **options: object
    ) -> list[Tensor]:
        """Output and gradients; the call chooses the blocks itself. `towards` is the output's gradient."""
        return self._gradients(nsa_attention(*self.leaves, config, backend=backend, **options), towards)

    def with_blocks(
        self, blocks: Tensor, config: NSAConfig, backend: str, towards: Tensor | None = None
    ) -> list[Tensor]:
        """Output and gradients with given blocks, branch by branch; `towards` is the output's gradient."""
        offset, scale, way = self.k.shape[1] - self.q.shape[1], self.q.shape[-1] ** -0.5, BACKENDS[backend]
        cmp, slc, win = self.gates.unbind(-1)
        out = way.compressed(self.q, compress(self.k, config), compress(self.v, config), cmp, config, offset, scale)
        out = out + way.selected(self.q, self.k, self.v, slc, blocks, config, scale)
        return self._gradients(out + way.window(self.q, self.k, self.v, win, config.window, scale), towards)

    def errors(self, config: NSAConfig, separately: bool = False) -> list[tuple[float, float]]:
        """Distances of output and gradients from float64, (ours, an eager run's) each, with the same blocks.

        Ours compute all branches at once, or `separately` branch by branch.
        """
        blocks = self.blocks(config)
        exact = self.to(torch.float64).with_blocks(blocks, config, "naive")
        eager = self.with_blocks(blocks, config, "naive")
        ours = self.with_blocks(blocks, config, "triton") if separately else self.run(config)
        norms = [[(x.double() - want).norm().item() for x, want in zip(xs, exact, strict=True)] for xs in (ours, eager)]
        return list(zip(*norms, strict=True))

    def _gradients(self, out: Tensor, towards: Tensor | None = None) -> list[Tensor]:
        if towards is None:
            towards = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        return [out.detach(), *torch.autograd.grad(out, self.leaves, towards.to(out.dtype))]


@pytest.fixture(autouse=True)
def freed_memory():
    """Give back what a test leaves in CUDA's caching allocator: other workers' tests share the card."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def make_case():
    def make(
        tokens: int,
        heads: int = 12,
        kv_heads: int = 2,
        dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        *,
        value_dim: int | None = None,
        batch: int = 1,
        rows: int | None = None,
        seed: int = 0,
    ) -> CudaCall:
        generator, rows = torch.Generator("cuda").manual_seed(seed), tokens if rows is None else rows

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, generator=generator, device="cuda").to(dtype).requires_grad_()

        q, k, v = normal(rows, heads, dim), normal(tokens, kv_heads, dim), normal(tokens, kv_heads, value_dim or dim)
        gates = torch.rand(batch, rows, heads, 3, generator=generator, device="cuda")
        return CudaCall(q, k, v, gates.to(dtype).requires_grad_())

    return make
