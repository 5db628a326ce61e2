"""Effects of environment variables, read back in the process that they were set for.

A few settings are read where they take effect: the allocator's as the allocator parsed them, the vector instructions
that PyTorch chose, blocking launches by their duration. For any other name the effective value is that in the process's
environment: whether something reads it, nobody knows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

UNSET = "unset"

_GPU_ONLY = re.compile(r"CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|FLASH_ATTENTION|PYTORCH_ALLOC_CONF")
# Options of the allocator by their names in its snapshot; an option without one is shown as it was written.
_IN_SNAPSHOT = {
    "max_split_size_mb": "max_split_size",
    "release_lock_on_device_malloc": "release_lock_on_cudamalloc",
    "pinned_use_device_host_register": "pinned_use_cuda_host_register",
}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def refusal(name: str, device: str, gpus: float) -> str | None:
    """Reason why a variable cannot have an effect on points here; None if it may have one.

    Args:
        device: "cpu" or "cuda".
        gpus: GPUs of a point.
    """
    if device == "cpu" and _GPU_ONLY.search(name):
        return "it concerns GPUs, and the points run on the CPU"
    # A point is one process. One that is given several GPUs may use NCCL among them; one alone has nobody to talk to.
    if "NCCL" in name and gpus <= 1:
        return "NCCL is not used by a point with one GPU"
    return None


def effective(names: Collection[str]) -> dict[str, str]:
    """Effective values in this process, by variable.

    Raises:
        RuntimeError, ValueError: PyTorch rejects the value of a setting.
    """
    return {name: _in_effect(name) if comparable(name) else os.environ.get(name, UNSET) for name in names}


def comparable(name: str) -> bool:
    """Whether `effective` reads the variable where it takes effect: equal values then mean an equal effect."""
    return name in (*_ALLOCATOR, "ATEN_CPU_CAPABILITY", "CUDA_LAUNCH_BLOCKING", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def _in_effect(name: str) -> str:
    import torch

    match name:
        case "ATEN_CPU_CAPABILITY":
            return torch.backends.cpu.get_cpu_capability()
        case "CUDA_LAUNCH_BLOCKING":
            return _launches()
        case "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE":
            return f"torch.backends.cuda.matmul.allow_tf32={torch.backends.cuda.matmul.allow_tf32}"
    return _allocator()


def _allocator() -> str:
    """The CUDA allocator's settings as it parsed them, "name=value name=value"."""
    import torch

    torch.cuda.init()
    backend = torch.cuda.get_allocator_backend()
    snapshot: Any = torch.cuda.memory._snapshot() if backend == "native" else {}  # CUDA's own allocator has none
    parsed = snapshot.get("allocator_settings", {})
    shown = {name: _plain(value) for name, value in parsed.items() if name not in _ALLOCATOR} | {"backend": backend}
    text = parsed.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))  # under either name
    for option in re.split(r",(?![^\[]*\])", text):
        name, _, value = option.strip().partition(":")
        if name and _IN_SNAPSHOT.get(name, name) not in shown:
            shown[name] = value
    return " ".join(f"{name}={value}" for name, value in sorted(shown.items()))


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{item}" for key, item in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def _launches() -> str:
    """ "blocking" if a launch returns only when its kernel has ended, else "asynchronous"; a kernel of some 30 ms."""
    import torch

    def seconds_to_launch() -> tuple[float, float]:
        begin = time.perf_counter()
        torch.cuda._sleep(50_000_000)  # cycles
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return launched - begin, time.perf_counter() - begin

    seconds_to_launch()  # loads the kernel
    launch, whole = seconds_to_launch()
    return "blocking" if launch > whole / 2 else "asynchronous"
