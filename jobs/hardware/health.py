"""Health of a GPU as NVML and the kernel's log tell it. What is not reported is left out; nothing here raises."""

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pynvml

from jobs.hardware import nvml
from jobs.schema import card_health as health
from jobs.schema.quantities import Quantity

_KERNEL_LOG = Path("/var/log/kern.log")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)")
# Codes that programs cause, not cards (NVIDIA, "Xid errors"): a kernel's exception, a bad address, their consequences.
_OF_PROGRAMS = {13, 31, 43, 45}

_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED

UNDER_LOAD: Mapping[Quantity, Callable[[Any], float]] = {  # clock and PCIe link rest when the card does
    health.LOAD_CLOCK: lambda device: pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
    health.PCIE_WIDTH: lambda device: pynvml.nvmlDeviceGetCurrPcieLinkWidth(device),
    health.PCIE_GENERATION: lambda device: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
}
_AT_REST: Mapping[Quantity, Callable[[Any], float]] = {
    health.GPU_COUNT: lambda device: pynvml.nvmlDeviceGetCount(),
    health.POWER_LIMIT: lambda device: pynvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,
    health.POWER_DEFAULT: lambda device: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1000,
    health.ECC_ERRORS: lambda device: pynvml.nvmlDeviceGetTotalEccErrors(
        device, _UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    ),
    health.ECC_ERRORS_EVER: lambda device: pynvml.nvmlDeviceGetTotalEccErrors(
        device, _UNCORRECTED, pynvml.NVML_AGGREGATE_ECC
    ),
    health.REMAPPED_ROWS: lambda device: sum(pynvml.nvmlDeviceGetRemappedRows(device)[:2]),
    health.REMAP_PENDING: lambda device: pynvml.nvmlDeviceGetRemappedRows(device)[2],
    health.REMAP_FAILED: lambda device: pynvml.nvmlDeviceGetRemappedRows(device)[3],
    health.PCIE_WIDTH_MAX: lambda device: pynvml.nvmlDeviceGetMaxPcieLinkWidth(device),
    health.PCIE_GENERATION_MAX: lambda device: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(device),
}


def at_rest(device: Any) -> tuple[dict[Quantity, float], dict[str, Any]]:
    """Counters and limits of an NVML device, and what tells it from others: its index, bus, and Xid codes."""
    found = read(device, _AT_REST)
    # A card without NVLink refuses every link; one that has links may refuse the highest numbers.
    links = [
        nvml.ask(lambda link=link: pynvml.nvmlDeviceGetNvLinkState(device, link))
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS)
    ]
    if any(link is not None for link in links):
        found[health.NVLINKS] = float(sum(link or 0 for link in links))
    card: dict[str, Any] = {"index": nvml.ask(lambda: pynvml.nvmlDeviceGetIndex(device))}
    if (bus := nvml.ask(lambda: pynvml.nvmlDeviceGetPciInfo(device).busId)) is not None:
        card["bus"] = bus.decode() if isinstance(bus, bytes) else bus
        if (log := _kernel_log()) is not None:
            card["xids"] = xids(log, card["bus"])
            found[health.XIDS] = float(len(card["xids"]))
    return found, {name: value for name, value in card.items() if value is not None}


def xids(log: str, bus: str) -> list[int]:
    """The Xid codes in a kernel's log that blame the card at a bus address ("00000000:3B:00.0"), as they came."""
    domain, _, rest = bus.lower().partition(":")  # NVML writes the domain with eight digits, the kernel with four
    address = f"{domain[-4:]}:{rest.partition('.')[0]}"
    found = [int(code) for where, code in _XID.findall(log) if where.lower() == address]
    return [code for code in found if code not in _OF_PROGRAMS]


def _kernel_log() -> str | None:
    """The kernel's messages since its start; None where this user may not read them."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=10)
        if done.returncode == 0:
            return done.stdout
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        return _KERNEL_LOG.read_text(errors="replace")
    except OSError:
        return None


def read(device: Any, queries: Mapping[Quantity, Callable[[Any], float]]) -> dict[Quantity, float]:
    """The quantities that the driver reports of an NVML device."""
    found = {quantity: nvml.ask(lambda query=query: query(device)) for quantity, query in queries.items()}
    return {quantity: float(value) for quantity, value in found.items() if value is not None}
