"""Operands for the operator's tests, and a configuration so small that every branch matters at 100 tokens."""

import os
from dataclasses import dataclass

import pytest
import torch
from quick_interpreter import quicken
from torch import Tensor

from nsa_core import NSAConfig, backends

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

BACKENDS = [name for name in backends.BACKENDS if name != "triton"]  # its tests need its interpreter or a GPU


@dataclass
class CpuCall:
    """Tensors of one call on the CPU; gradients are computed for `leaves`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.gates]

    def to(self, dtype: torch.dtype) -> "CpuCall":
        return CpuCall(*(x.detach().to(dtype).requires_grad_() for x in self.leaves))


@pytest.fixture
def config() -> NSAConfig:
    return NSAConfig(cmp_block=8, cmp_stride=4, slc_block=16, slc_count=4, init_blocks=1, local_blocks=2, window=24)


@pytest.fixture
def make_case():
    def make(
        tokens, heads=4, kv_heads=2, dim=16, value_dim=None, batch=1, dtype=torch.float32, seed=0, rows=None
    ) -> CpuCall:
        generator = torch.Generator().manual_seed(seed)
        rows = tokens if rows is None else rows

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

        gates = torch.rand(batch, rows, heads, 3, generator=generator).to(dtype).requires_grad_()
        q, k = normal(batch, rows, heads, dim), normal(batch, tokens, kv_heads, dim)
        return CpuCall(q, k, normal(batch, tokens, kv_heads, value_dim or dim), gates)

    return make


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(params=[name for name in BACKENDS if name != "reference"])
def fast_backend(request) -> str:
    """Backends to compare with the reference."""
    return request.param


@pytest.fixture
def many_chunks(monkeypatch):
    """A workspace so small that the chunked backend cuts even a short sequence into several chunks."""
    monkeypatch.setattr(backends.chunked, "_BUDGET", {"cpu": (150_000, 150_000), "cuda": (150_000, 150_000)})
