"""Whether the PyTorch installed here fits this host's NVIDIA driver, and which build does.

`python -m jobs.hardware.driver` ends with the reason and exit code 1 if PyTorch sees no GPU; with `--warn` it only
warns, and only on a host that has a driver.
"""

import sys
import warnings
from typing import NamedTuple

import pynvml

from jobs.hardware import nvml

# PyTorch 2.11 to 2.13's builds by the major version of CUDA that the driver must support, newest first (the support
# matrix in PyTorch's RELEASE.md).
_BUILDS = ((13, "cu130"), (12, "cu126 (on a Blackwell card: cu128 of PyTorch 2.11)"))
_HOW = "pytorch.org/get-started has the command; run it with this environment's pip"
_UPDATE = "update the driver to 580 or newer"
_NO_GPU = "PyTorch sees no CUDA device here; run this on a GPU host, with its driver and a PyTorch for CUDA"


class Driver(NamedTuple):
    """The NVIDIA driver of this host."""

    version: str  # as NVIDIA numbers it, "535.183.01"
    cuda: str  # newest version of CUDA that it runs, "12.2"


class Misfit(NamedTuple):
    """Why PyTorch cannot use the GPUs of this host, and the fix."""

    problem: str
    fix: str


def installed_driver() -> Driver | None:
    """The NVIDIA driver of this host, asked without PyTorch; None if NVML finds none, or no CUDA library beside it."""
    try:
        with nvml.session():
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            return Driver(str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}")
    except (nvml.NvmlError, pynvml.NVMLError):
        return None


def misfit(pytorch: str, cuda: str | None, driver: Driver | None) -> Misfit | None:
    """Reason why a PyTorch cannot run on the driver; None if it can, or if there is no driver (None).

    A driver runs programs built for its own major version of CUDA and for older ones, in any minor version. `cuda` is
    the version that PyTorch was built for; None: for the CPU alone.
    """
    if driver is None:
        return None
    newest = int(driver.cuda.split(".")[0])
    if cuda is not None and int(cuda.split(".")[0]) <= newest:
        return None
    if cuda is None:
        problem = f"the installed PyTorch {pytorch} is built without CUDA, the host has an NVIDIA driver"
        problem += f" ({driver.version}, CUDA {driver.cuda})"
    else:
        problem = f"the NVIDIA driver {driver.version} supports CUDA {driver.cuda}, "
        problem += f"the installed PyTorch {pytorch} is built for CUDA {cuda}"
    fitting = next((build for major, build in _BUILDS if major <= newest), None)
    if fitting is None:
        return Misfit(problem, _UPDATE)
    install = f"install PyTorch's build {fitting}: {_HOW}"
    return Misfit(problem, install if cuda is None else f"{install}; or {_UPDATE}")


def misfit_here() -> Misfit | None:
    """`misfit` of the installed PyTorch and this host's driver; None, too, if PyTorch sees a GPU.

    Raises ImportError or OSError: PyTorch is not installed, or does not load.
    """
    import torch

    with warnings.catch_warnings(action="ignore"):  # PyTorch's own warning of an old driver names no build
        if torch.cuda.is_available():
            return None
    return misfit(str(torch.__version__), torch.version.cuda, installed_driver())


def main(arguments: list[str]) -> str | None:
    """The error to end with; None if a GPU can be used, or if there is only a warning to print."""
    warn = arguments == ["--warn"]
    try:
        import torch

        found = misfit_here()
    except (ImportError, OSError) as err:
        reason = str(err).partition("\n")[0]
        return None if warn else f"error: device: PyTorch does not load here ({reason}); make env"
    text = f"device: {found.problem}; {found.fix}" if found else f"device: {_NO_GPU}"
    if warn and found:
        print(f"warning: {text}", file=sys.stderr)
    return None if warn or torch.cuda.is_available() else f"error: {text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
