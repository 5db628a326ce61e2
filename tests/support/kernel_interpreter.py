"""Marks, sizes, fixtures and gradients for tests of the Triton kernels in Triton's interpreter."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_core import NSAConfig, nsa_attention

MARKS = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the interpreter is for machines without a GPU: see tests/gpu"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy about log2(0) and exp2 of masked scores
]
SMALL = {"cmp_block": 8, "cmp_stride": 4, "slc_block": 16, "slc_count": 4, "window": 24}


@pytest.fixture
def config() -> NSAConfig:
    """A window that holds the local blocks, so that keys of both window and selected branch are computed once."""
    return NSAConfig(**SMALL | {"window": 40})


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in the interpreter, and what follows from shapes is worked out anew: it differs between tests."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from nsa_core.kernels.runtime import replay  # Kernels are made for the interpreter when first imported.

    replay.kept.cache_clear()


def run(leaves: Sequence[Tensor], config: NSAConfig, backend: str, **options: Any) -> list[Tensor]:
    """Output of a call, and gradients for its leaves with fixed weights."""
    out = nsa_attention(*leaves, config, backend=backend, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]
