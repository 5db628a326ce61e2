"""The choice among flash kernels, by card, packages, dtype, head dim and case; without a GPU."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from nsa_core import BackendError
from nsa_core.backends import dense, flash
from nsa_core.backends.flash import Host

BF16, FP32 = torch.bfloat16, torch.float32
A100, H200, B200 = (8, 0), (9, 0), (10, 0)
NO_PACKAGES = flash.lacking({})
HOPPER = ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-math")
OTHERS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")

CHOICES = [
    # capability, what lacks, dtype, head dim, case, the candidates
    (H200, {}, BF16, 64, "square", ("flash-attn-4",)),
    (H200, NO_PACKAGES, BF16, 64, "square", HOPPER),
    (H200, {}, BF16, 64, "one row", OTHERS),
    (H200, {}, BF16, 264, "square", HOPPER),
    (A100, {}, BF16, 64, "square", ("flash-attn-2",)),
    (A100, NO_PACKAGES, BF16, 64, "square", OTHERS),
    (B200, {}, BF16, 136, "square", HOPPER),
    (None, {}, BF16, 64, "square", OTHERS),
    (H200, {}, BF16, 64, "band", ("flash-attn-4",)),
    (H200, NO_PACKAGES, BF16, 64, "band", ("torch-varlen",)),
    (A100, {}, torch.float16, 64, "band", ("flash-attn-2",)),
    (H200, {}, FP32, 64, "band", ("chunked",)),
    (H200, {}, BF16, 264, "band", ("chunked",)),
    ((7, 5), {}, BF16, 64, "band", ("chunked",)),
]

REFUSALS = [
    # kernel, capability, what lacks, dtype, head dim, case, why
    ("flash-attn-4", A100, {}, BF16, 64, "square", r"9\.0 to 11\.x, this one has 8\.0; use one of auto, sdpa"),
    ("flash-attn-4", H200, NO_PACKAGES, BF16, 64, "band", "flash-attn-4 is not installed .*: pip install flash-a"),
    ("torch-varlen", H200, {}, FP32, 64, "square", "it computes bfloat16 and float16, not float32; use one of auto$"),
    ("sdpa-cudnn", H200, {}, BF16, 64, "band", "neither windows nor several rows"),
    ("sdpa-flash", H200, {}, BF16, 512, "square", "head dims up to 256 there, not 512"),
    ("flash9", H200, {}, BF16, 64, "square", "use one of auto, sdpa-cudnn, sdpa-flash, flash-attn-4, flash-attn-2"),
]


@pytest.mark.parametrize(("capability", "lacks", "dtype", "width", "case", "expected"), CHOICES)
def test_the_fastest_usable_kernel_is_taken(capability, lacks, dtype, width, case, expected):
    assert dense.candidates("auto", case, Host(capability, lacks), dtype, width) == expected


@pytest.mark.parametrize(("kernel", "capability", "lacks", "dtype", "width", "case", "why"), REFUSALS)
def test_an_unusable_kernel_is_refused_with_the_reason(kernel, capability, lacks, dtype, width, case, why):
    with pytest.raises(BackendError, match=rf"^backend: '{kernel}': .*{why}"):
        dense.candidates(kernel, case, Host(capability, lacks), dtype, width)


def test_a_package_that_does_not_load_is_not_taken(monkeypatch):
    def version(package: str) -> str:
        if package == "flash-attn":
            return "2.8.3"
        raise PackageNotFoundError(package)

    monkeypatch.setattr(flash.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # its import raises ImportError
    lacks = flash._lacking.__wrapped__()
    assert lacks["flash-attn-2"].startswith("flash-attn 2.8.3 does not load: ")
    assert lacks["flash-attn-4"] == "flash-attn-4 is not installed on the GPU host: pip install flash-attn-4"
