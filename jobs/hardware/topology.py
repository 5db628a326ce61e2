"""Topology of this host: cores and NUMA nodes, GPUs and the links between them. Nothing here raises or uses CUDA."""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pynvml

from jobs.hardware import nvml
from jobs.hardware.machine import cpu_name, host_memory

_PCI = Path("/sys/bus/pci/devices")

NVLINK = "NVLink"
# Nearest common ancestor of two GPUs (NVML, nvmlGpuTopologyLevel_t), named as by `nvidia-smi topo`.
_ANCESTORS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host; None for what NVML does not report."""

    id: str
    name: str
    uuid: str
    numa: int | None = None  # its NUMA node
    memory_mib: float | None = None  # of the card
    used_mib: float | None = None  # by all processes
    utilization: float | None = None  # [%], of NVML's last interval
    throttled: bool = False  # whether its clock is lowered against its will
    processes: tuple[int, ...] | None = None  # those with a compute context, as NVML numbers them


@dataclass(frozen=True)
class Topology:
    """A host as one of its processes finds it."""

    host: str
    cpu: str
    cores: str  # that the process may run on, as ranges
    numa: Mapping[int, str]  # cores of each NUMA node, as ranges
    memory_mib: float  # that a process may still allocate
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()  # the visible ones; empty without NVML, whose `problem` says why
    links: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by two UUIDs: NVLINK, or as `nvidia-smi topo`
    problem: str | None = None

    def placement(self) -> dict[str, Any]:
        """Cores, NUMA nodes and links, without what tells this host from others: for a point's environment."""
        ids = {gpu.uuid: gpu.id for gpu in self.gpus}
        return {
            "cores": self.cores,
            "numa": {str(node): cores for node, cores in self.numa.items()},
            "gpus": {gpu.id: gpu.numa for gpu in self.gpus},
            "links": {f"{ids[a]} to {ids[b]}": way for (a, b), way in self.links.items()},
        }


def topology(gpu_ids: Sequence[str] | None = None) -> Topology:
    """This host's topology, with the GPUs of these NVML ids; None: all that this process sees."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": cores_of(os.getpid()),
        "numa": {int(path.name[4:]): (path / "cpulist").read_text().strip() for path in nodes},
        "memory_mib": host_memory() / 2**20,
    }
    try:
        with nvml.session():
            handles = [nvml.handle(gpu) for gpu in (nvml.visible_gpus() if gpu_ids is None else gpu_ids)]
            gpus = tuple(_gpu(str(place), device) for place, device in enumerate(handles))
            pairs = combinations(zip(gpus, handles, strict=True), 2)
            links: dict[tuple[str, str], str] = {}
            for (a, one), (b, other) in pairs:
                direct = partial(pynvml.nvmlDeviceGetP2PStatus, one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                ancestor = nvml.ask(partial(pynvml.nvmlDeviceGetTopologyCommonAncestor, one, other))
                links[a.uuid, b.uuid] = NVLINK if nvml.ask(direct) == 0 else _ANCESTORS.get(ancestor, "unknown")
            driver = nvml.ask(pynvml.nvmlSystemGetDriverVersion)
            return Topology(**found, driver=driver, gpus=gpus, links=links)
    except (nvml.NvmlError, pynvml.NVMLError) as err:
        return Topology(**found, problem=str(err))


def cores_of(pid: int) -> str:
    """Cores that a process may run on, as ranges: "0-3,8"; "" if it is gone, or its system does not tell."""
    parts: list[list[int]] = []
    with contextlib.suppress(psutil.Error, AttributeError):
        for core in sorted(psutil.Process(pid).cpu_affinity() or ()):
            if parts and core == parts[-1][-1] + 1:
                parts[-1] = [parts[-1][0], core]
            else:
                parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def members(text: str) -> set[int]:
    """The numbers in ranges."""
    bounds = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in bounds for number in range(int(first), int(last or first) + 1)}


def _gpu(place: str, device: Any) -> Gpu:
    memory = nvml.ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(device))
    reasons = nvml.ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)) or 0
    pids = nvml.ask(lambda: nvml.compute_pids(device))
    numa = None
    with contextlib.suppress(OSError, ValueError, pynvml.NVMLError):
        bus = pynvml.nvmlDeviceGetPciInfo(device).busId
        domain, _, rest = (bus.decode() if isinstance(bus, bytes) else bus).lower().partition(":")
        # NVML writes the domain with eight digits, Linux with four. -1: the host has no NUMA nodes.
        numa = int((_PCI / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    return Gpu(
        id=place,
        name=str(nvml.ask(lambda: pynvml.nvmlDeviceGetName(device)) or "unknown"),
        uuid=str(nvml.ask(lambda: pynvml.nvmlDeviceGetUUID(device)) or place),
        numa=None if numa is None or numa < 0 else numa,
        memory_mib=None if memory is None else int(memory.total) / 2**20,
        used_mib=None if memory is None else int(memory.used) / 2**20,
        utilization=nvml.ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu),
        throttled=bool(reasons & nvml.throttles(device)),
        processes=None if pids is None else tuple(pids),
    )
