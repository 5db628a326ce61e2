"""Effects of environment variables, read back in the process that they were set for.

A few settings are read where they take effect: the allocator's as the allocator parsed them, the vector instructions
that PyTorch chose, blocking launches by their duration; any other in the process's environment.
"""

import os
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

_GPU_ONLY = re.compile(r"CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|FLASH_ATTENTION|PYTORCH_ALLOC_CONF")
# Options of the allocator by their names in its snapshot; an option without one is shown as it was written.
_IN_SNAPSHOT = {
    "max_split_size_mb": "max_split_size",
    "release_lock_on_device_malloc": "release_lock_on_cudamalloc",
    "pinned_use_device_host_register": "pinned_use_cuda_host_register",
}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

COMPARABLE = (*_ALLOCATOR, "ATEN_CPU_CAPABILITY", "CUDA_LAUNCH_BLOCKING", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that `effective` reads where they take effect: equal values then mean an equal effect."""


def refusal(name: str, device: str, gpus: float) -> str | None:
    """Reason why a variable cannot have an effect on points of a device with so many GPUs each; None if it may."""
    if device == "cpu" and _GPU_ONLY.search(name):
        return "it concerns GPUs, and the points run on the CPU"
    # A point is one process. One that is given several GPUs may use NCCL among them; one alone has nobody to talk to.
    if "NCCL" in name and gpus <= 1:
        return "NCCL is not used by a point with one GPU"
    return None


def effective(names: Collection[str]) -> dict[str, str]:
    """Effective values in this process, by variable. Raises RuntimeError, ValueError: PyTorch rejects a value."""
    found = {}
    for name in names:
        if name not in COMPARABLE:
            found[name] = os.environ.get(name, "unset")
            continue
        import torch

        match name:
            case "ATEN_CPU_CAPABILITY":
                found[name] = torch.backends.cpu.get_cpu_capability()
            case "CUDA_LAUNCH_BLOCKING":
                begin = launched = ended = 0.0
                for _ in range(2):  # the first time loads the kernel, which takes some 30 ms
                    begin = time.perf_counter()
                    torch.cuda._sleep(50_000_000)  # cycles
                    launched = time.perf_counter()
                    torch.cuda.synchronize()
                    ended = time.perf_counter()
                found[name] = "blocking" if launched - begin > (ended - begin) / 2 else "asynchronous"
            case "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE":
                allowed = torch.backends.cuda.matmul.allow_tf32
                found[name] = f"torch.backends.cuda.matmul.allow_tf32={allowed}"
            case _:
                found[name] = _allocator()
    return found


def _allocator() -> str:
    """The CUDA allocator's settings as it parsed them, "name=value name=value"."""
    import torch

    torch.cuda.init()
    backend = torch.cuda.get_allocator_backend()
    snapshot: Any = torch.cuda.memory._snapshot() if backend == "native" else {}  # CUDA's own allocator has none
    parsed = snapshot.get("allocator_settings", {})
    shown: dict[str, str] = {}
    for name in parsed.keys() - {*_ALLOCATOR}:
        value = parsed[name]
        if isinstance(value, Mapping):
            value = ",".join(f"{key}:{item}" for key, item in value.items())
        shown[name] = f"{value:g}" if isinstance(value, float) else str(value)
    shown["backend"] = backend
    text = parsed.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))  # under either name
    for option in re.split(r",(?![^\[]*\])", text):
        name, _, value = option.strip().partition(":")
        if name and _IN_SNAPSHOT.get(name, name) not in shown:
            shown[name] = value
    return " ".join(f"{name}={value}" for name, value in sorted(shown.items()))
