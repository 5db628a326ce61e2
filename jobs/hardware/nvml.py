"""The part of NVML that measuring needs. A missing driver or card raises NvmlError with the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

_LOADED = Path("/proc/driver/nvidia/version")  # the kernel's own word, also where no NVML library is installed
# First driver branch that runs programs built for a major version of CUDA, newest first (docs.nvidia.com/deploy/
# cuda-compatibility, "minor version compatibility").
_BRANCHES = ((580, 13), (525, 12), (450, 11))

# Clock event reasons that slow a GPU against its will (NVML documentation, nvmlClocksEventReasons).
POWER_CAP = 0x4
THROTTLES = {
    POWER_CAP: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def throttles(device: Any) -> int:
    """Mask of the reasons that slow a GPU against its will. At its own limit of power a busy card is as fast as it is
    made to be (an H200 in training, at 690 of 700 W): that is no throttle unless someone lowered the limit."""
    limit = ask(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(device))
    usual = ask(lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device))
    capped = limit is None or usual is None or limit < usual
    return sum(THROTTLES) - (0 if capped else POWER_CAP)


class NvmlError(RuntimeError):
    """NVML cannot answer: no driver, no such card, or no permission; the message says which."""


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver of this host.

    Attributes:
        version: as NVIDIA numbers it, "535.183.01".
        cuda: newest version of CUDA that it runs, "12.2", or "12.x" if the driver's branch alone tells.
    """

    version: str
    cuda: str

    @property
    def major(self) -> int:
        """Newest major version of CUDA whose programs it runs, in any minor version."""
        return int(self.cuda.split(".")[0])


def driver() -> Driver | None:
    """The NVIDIA driver of this host, asked without PyTorch; None if none is loaded."""
    try:
        with session():
            version = str(pynvml.nvmlSystemGetDriverVersion())
            cuda = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)  # None: no CUDA library beside the driver
            return Driver(version, _cuda_of(version) if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}")
    except (NvmlError, pynvml.NVMLError):
        pass
    try:
        found = re.search(r"NVRM version:.*?\s(\d+(\.\d+)+)\s", _LOADED.read_text())
    except OSError:
        return None
    return Driver(found[1], _cuda_of(found[1])) if found else None


def _cuda_of(version: str) -> str:
    branch = int(version.split(".")[0])
    return next((f"{major}.x" for first, major in _BRANCHES if branch >= first), "10.x")


@contextmanager
def session() -> Iterator[None]:
    """Keep NVML initialised within the block; sessions may nest. Raises NvmlError."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        raise NvmlError(f"NVML is not available ({err})") from None
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def handle(gpu_id: str) -> Any:
    """NVML handle of a GPU, given by its index ("0") or UUID ("GPU-..."). Raises NvmlError."""
    try:
        if gpu_id.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(gpu_id))
        return pynvml.nvmlDeviceGetHandleByUUID(gpu_id)
    except pynvml.NVMLError as err:
        raise NvmlError(f"NVML knows no GPU {gpu_id!r} ({err})") from None


def ask(query: Callable[[], Any]) -> Any:
    """The answer of NVML; None where this driver or card does not have it, though it may have others."""
    try:
        return query()
    except (pynvml.NVMLError, NvmlError):
        return None


def visible_gpus() -> list[str]:
    """Ids of the GPUs visible to this process, in CUDA's order; empty without a GPU or NVML."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [part.strip() for part in shown.split(",") if part.strip() and part.strip() != "-1"]
    try:
        with session():
            return [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except (NvmlError, pynvml.NVMLError):
        return []


class UtilizationMeter:
    """Utilisation of one GPU whenever it is asked for. NVML stays open with the process: opening it takes long."""

    def __init__(self, gpu_id: str | None) -> None:
        self._device: Any = None
        if gpu_id is None:
            return
        try:
            pynvml.nvmlInit()
            self._device = handle(gpu_id)
        except (NvmlError, pynvml.NVMLError):
            pass  # `now` tells so

    def now(self) -> float | None:
        """Share of the driver's last interval in which a kernel ran [%]; None if NVML does not tell."""
        return None if self._device is None else ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(self._device).gpu)


def processes(gpu_ids: Sequence[str]) -> dict[str, list[int]]:
    """Ids of the processes with a compute context on each GPU; in a container, the host's ids.

    Raises:
        NvmlError: NVML cannot list them.
    """
    with session():
        return {gpu: compute_pids(handle(gpu)) for gpu in gpu_ids}


def compute_pids(device: Any) -> list[int]:
    """Ids of the processes with a compute context on the device of this handle. Raises NvmlError."""
    try:
        return sorted(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    except pynvml.NVMLError as err:
        raise NvmlError(f"NVML cannot list the GPU's processes ({err})") from None


def describe(gpu_id: str) -> dict[str, str]:
    """Name, UUID, memory, compute capability, driver, clocks, power limit and ECC of a GPU, as text.

    Values that NVML refuses to give are left out.

    Raises:
        NvmlError: NVML is not available or does not know the GPU.
    """
    with session():
        device = handle(gpu_id)
        queries = {
            "name": lambda: pynvml.nvmlDeviceGetName(device),
            "uuid": lambda: pynvml.nvmlDeviceGetUUID(device),
            "memory_mib": lambda: int(pynvml.nvmlDeviceGetMemoryInfo(device).total) // 2**20,
            "capability": lambda: "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(device)),
            "driver": pynvml.nvmlSystemGetDriverVersion,
            "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_MEM),
            "power_limit_w": lambda: pynvml.nvmlDeviceGetPowerManagementLimit(device) // 1000,
            "ecc": lambda: pynvml.nvmlDeviceGetEccMode(device)[0],
        }
        found = {name: ask(query) for name, query in queries.items()}
        return {name: str(value) for name, value in found.items() if value is not None}
