"""Whether the PyTorch installed here fits this host's NVIDIA driver, and which build does.

`python -m jobs.hardware.driver` ends with the reason and exit code 1 if PyTorch sees no GPU; with `--warn` it only
warns, and only on a host that has a driver.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass

from jobs.hardware import nvml
from jobs.hardware.nvml import Driver

_HOW = "pytorch.org/get-started has the command; run it with this environment's pip"
_UPDATE = "update the driver to 580 or newer"
# Builds of PyTorch 2.11 to 2.13 by the major version of CUDA that the driver must support, newest first. cu126 has no
# kernels for Blackwell (the support matrix in PyTorch's RELEASE.md).
_BUILDS = ((13, "cu130"), (12, "cu126 (on a Blackwell card: cu128 of PyTorch 2.11)"))
_NO_GPU = "PyTorch sees no CUDA device here; run this on a GPU host, with its driver and a PyTorch for CUDA"


@dataclass(frozen=True)
class Build:
    """The installed PyTorch: its version, and the CUDA version that it was built for (None: for the CPU alone)."""

    version: str
    cuda: str | None


@dataclass(frozen=True)
class Misfit:
    """Why PyTorch cannot use the GPUs of this host, and the fix."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.fix}"


def misfit(build: Build, driver: Driver | None) -> Misfit | None:
    """Reason why the build cannot run on the driver; None if it can, or if there is no driver (None).

    A driver runs programs built for its own major version of CUDA and for older ones, in any minor version: CUDA 12
    needs a driver of 525 or newer, CUDA 13 one of 580 (docs.nvidia.com/deploy/cuda-compatibility).
    """
    if driver is None or (build.cuda is not None and int(build.cuda.split(".")[0]) <= driver.major):
        return None
    fitting = next((name for major, name in _BUILDS if major <= driver.major), None)
    if build.cuda is None:
        problem = f"the installed PyTorch {build.version} is built without CUDA, the host has an NVIDIA driver"
        problem += f" ({driver.version}, CUDA {driver.cuda})"
    else:
        problem = f"the NVIDIA driver {driver.version} supports CUDA {driver.cuda}, "
        problem += f"the installed PyTorch {build.version} is built for CUDA {build.cuda}"
    if fitting is None:
        return Misfit(problem, _UPDATE)
    install = f"install PyTorch's build {fitting}: {_HOW}"
    return Misfit(problem, install if build.cuda is None else f"{install}; or {_UPDATE}")


def misfit_here() -> Misfit | None:
    """`misfit` of the installed PyTorch and this host's driver; None, too, if PyTorch sees a GPU.

    Raises:
        ImportError, OSError: PyTorch is not installed, or does not load.
    """
    import torch

    with warnings.catch_warnings(action="ignore"):  # PyTorch's own warning of an old driver names no build
        if torch.cuda.is_available():
            return None
    return misfit(Build(str(torch.__version__), torch.version.cuda), nvml.driver())


def main(arguments: list[str]) -> str | None:
    """The error to end with; None if a GPU can be used, or if there is only a warning to print."""
    warn = arguments == ["--warn"]
    try:
        import torch

        found = misfit_here()
    except (ImportError, OSError) as err:
        return (
            None if warn else f"error: device: PyTorch does not load here ({str(err).partition(chr(10))[0]}); make env"
        )
    if warn:
        if found:
            print(f"warning: device: {found}", file=sys.stderr)
        return None
    if found is None and torch.cuda.is_available():
        return None
    return f"error: device: {found or _NO_GPU}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
