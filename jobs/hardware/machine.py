"""Probe of this machine for points. Asks NVML first, so that probing creates no CUDA context.

PyTorch, whose import takes seconds, is imported where it may find a GPU alone.
"""

import platform
import runpy
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from jobs.hardware import nvml
from jobs.schema.point import TRITON_PROBLEM, Machine

_FLASH = ("flash-attn", "flash-attn-4")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_MEMORY = (  # version 2, then 1: limit, usage, and the reclaimable part of the usage
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def probe(device: Literal["auto", "cpu", "cuda"]) -> Machine:
    """Device that a point started here would use; "auto" is CUDA if a GPU is visible.

    Raises ModuleNotFoundError without PyTorch, ValueError if `device` is "cuda" and no GPU is visible here.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    build = runpy.run_path(str(Path(spec.submodule_search_locations[0], "version.py")))  # the names of torch.version
    gpu = False
    if device != "cpu" and (build["cuda"] or build["hip"]):
        import torch

        gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise ValueError("device: 'cuda': no CUDA device is visible here; use device: cpu or auto, or a GPU node")
    versions = {"python": platform.python_version(), "torch": build["__version__"]}
    triton = None
    if find_spec("triton") is not None and not (triton := installed("triton")):  # a build of another name
        from nsa_core.backends.triton import triton_version

        triton = triton_version()
    if triton:
        versions["triton"] = triton
    if not gpu:
        return Machine("cpu", cpu_name(), host_memory(), versions)
    import torch

    from nsa_core.backends.triton import triton_problem

    try:
        card = nvml.describe(nvml.visible_gpus()[0])
    except (nvml.NvmlError, IndexError):
        card = {}
    if not {"name", "memory_mib", "capability"} <= card.keys():  # NVML does not know it: ask CUDA, with a context
        found = torch.cuda.get_device_properties(0)
        card = {"name": found.name, "memory_mib": str(found.total_memory // 2**20)}
        card["capability"] = f"{found.major}.{found.minor}"
    versions["cuda"] = build["cuda"] or "unknown"
    versions |= {name: card.get(name, "unknown") for name in ("driver", "capability")}
    versions |= {package: version for package in _FLASH if (version := installed(package))}
    if triton and (problem := triton_problem()):
        versions[TRITON_PROBLEM] = problem
    return Machine("cuda", card["name"], int(card["memory_mib"]) * 2**20, versions)


def host_memory() -> int:
    """Bytes that a process may still allocate: the host's available memory, or its control group's room if less."""
    available = psutil.virtual_memory().available
    for limit, usage, stat, cached in _CGROUP_MEMORY:
        try:
            room = int((_CGROUP / limit).read_text()) - int((_CGROUP / usage).read_text())
            lines = (_CGROUP / stat).read_text().splitlines()
        except (OSError, ValueError):  # no such group, or "max": no limit
            continue
        # Usage includes cached files; inactive ones count as free, as they do on the host.
        room += sum(int(line.split()[1]) for line in lines if line.startswith(f"{cached} "))
        available = min(available, max(room, 0))
    return available


def cpu_name() -> str:
    """Name of the processor, e.g. "AMD EPYC 9654 96-Core Processor"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed(package: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
