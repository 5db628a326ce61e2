"""Versions that the kernels were run with on a GPU, and whether the Triton installed here can be used.

The ranges are stated here alone; pyproject.toml's bounds are checked against them by tests/deploy/test_install.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec

import torch


class Tested:
    """Minor versions of a package, the first and the last, that tests/gpu passed with on a card.

    Attributes:
        requirement: the range as pip takes it: "triton>=3.6,<3.10".
    """

    def __init__(self, package: str, first: tuple[int, int], last: tuple[int, int]) -> None:
        self._first, self._last = first, last
        self.requirement = f"{package}>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"

    def __contains__(self, version: str) -> bool:
        """Whether a version ("3.6.0", "2.11.0+cu130") is in the range; one that cannot be read is not."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self._first <= (int(found[1]), int(found[2])) <= self._last

    def __str__(self) -> str:
        return "{}.{} to {}.{}".format(*self._first, *self._last)


TRITON = Tested("triton", (3, 6), (3, 9))
TORCH = Tested("torch", (2, 11), (2, 13))

_MISSING = 'it needs Triton: pip install "nsa-bench[gpu]"'
_ENTRIES = ("operators", "decode.step", "training.cross_entropy", "training.heads", "training.swiglu")


def untested(version: str) -> str | None:
    """Reason why the kernels do not run with this version of Triton, with the fix; None if they were run with it."""
    if version in TRITON:
        return None
    return f'Triton {version} is untested, the kernels were run with {TRITON}: pip install "nsa-bench[gpu]"'


def triton_version() -> str | None:
    """Version of the installed Triton; None without one."""
    if find_spec("triton") is None:
        return None
    for name in ("triton", "pytorch-triton"):  # the latter is of PyTorch's nightly builds
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


@cache
def triton_problem() -> str | None:
    """Reason why the kernels cannot run with the Triton here, with the fix; None if they can. Found once a process.

    Importing the kernels takes about half a second, and no driver.
    """
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA's GPUs, and this PyTorch is for AMD's"
    version = triton_version()
    if version is None:
        return _MISSING
    if reason := untested(version):
        return reason
    try:
        for entry in _ENTRIES:
            import_module(f"nsa_core.kernels.{entry}")
    except Exception as err:  # whatever the import raises, other backends remain
        problem = f"{type(err).__name__}: {str(err).partition(chr(10))[0]}"
        again = f'pip install --force-reinstall "{TRITON.requirement}"'
        return f"the kernels do not load with the Triton {version} installed here ({problem}): {again}"
    return None
