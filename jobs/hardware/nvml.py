"""The part of NVML that measuring needs. A missing driver or card raises NvmlError with the reason."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

_UUID = len("GPU-00000000-0000-0000-0000-000000000000")
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
    """NVML handle of a GPU, given by its index ("0"), UUID ("GPU-...", "MIG-...") or its begin. Raises NvmlError."""
    try:
        if gpu_id.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(gpu_id))
        if gpu_id.startswith("GPU-") and len(gpu_id) < _UUID:  # CUDA takes GPU-8932f937, too; NVML does not
            devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            begin = [device for device in devices if pynvml.nvmlDeviceGetUUID(device).startswith(gpu_id)]
            if len(begin) == 1:
                return begin[0]
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


def utilization_meter(gpu_id: str | None) -> Callable[[], float | None]:
    """Function that gives the share of the driver's last interval in which a kernel ran on a GPU [%]; None: unknown."""
    try:
        if gpu_id is not None:
            pynvml.nvmlInit()  # and not shut down: opening it takes long
            device = handle(gpu_id)
            return lambda: ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu)
    except (NvmlError, pynvml.NVMLError):
        pass
    return lambda: None


def compute_pids(device: Any) -> list[int]:
    """Ids of the processes with a compute context on a device; in a container, the host's ids. Raises NvmlError."""
    try:
        return sorted(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    except pynvml.NVMLError as err:
        raise NvmlError(f"NVML cannot list the GPU's processes ({err})") from None


def describe(gpu_id: str) -> dict[str, str]:
    """Name, UUID, index, memory, driver, clocks, power limit and so on of a GPU as text, as far as NVML tells.

    Raises NvmlError: NVML is not available or does not know the GPU.
    """
    with session():
        device = handle(gpu_id)
        queries = {
            "name": lambda: pynvml.nvmlDeviceGetName(device),
            "uuid": lambda: pynvml.nvmlDeviceGetUUID(device),
            "index": lambda: pynvml.nvmlDeviceGetIndex(device),
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
