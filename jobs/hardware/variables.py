"""Effects of environment variables, read back in the process that they were set for.

A few settings are read where they take effect: the allocator's as the allocator parsed them, the vector instructions
that PyTorch chose, blocking launches by their duration. For any other name the effective value is that in the process's
environment, and the proof that something reads it is the name's occurrence in the code of PyTorch, Triton, NVIDIA's
packages and the loaded libraries.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

UNSET = "unset"

_PACKAGES = ("torch", "triton", "nvidia", "flash_attn", "cuda")
_CHUNK_BYTES = 1 << 26
_GPU_ONLY = re.compile(r"CUDA|CUBLAS|CUDNN|NCCL|NVIDIA|FLASH_ATTENTION|PYTORCH_ALLOC_CONF")
# Variables of the CUDA driver, which documents them but does not spell all of them out in its library:
# CUDA Programming Guide, "CUDA Environment Variables".
_DRIVERS_OWN = {
    *("CUDA_AUTO_BOOST", "CUDA_CACHE_DISABLE", "CUDA_CACHE_MAXSIZE", "CUDA_CACHE_PATH", "CUDA_DISABLE_PTX_JIT"),
    *("CUDA_BINARY_LOADER_THREAD_COUNT", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE"),
    *("CUDA_DEVICE_WAITS_ON_EXCEPTION", "CUDA_FORCE_PTX_JIT", "CUDA_MODULE_DATA_LOADING", "CUDA_MODULE_LOADING"),
    *("CUDA_ERROR_LOGGING_MAX_BUFFER_SIZE", "CUDA_SCALE_LAUNCH_QUEUES", "CUDA_GRAPHS_USE_NODE_PRIORITY"),
}
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
    if name in _READERS or name in _DRIVERS_OWN or occurs(name):
        return None
    return "nothing in the installed PyTorch, Triton and NVIDIA libraries reads a variable of this name"


def effective(names: Collection[str]) -> dict[str, str]:
    """Effective values in this process, by variable.

    Raises:
        RuntimeError, ValueError: PyTorch rejects the value of a setting.
    """
    return {name: _READERS.get(name, lambda name=name: os.environ.get(name, UNSET))() for name in names}


def comparable(name: str) -> bool:
    """Whether `effective` reads the variable where it takes effect: equal values then mean an equal effect."""
    return name in _READERS


@cache
def occurs(name: str) -> bool:
    """Whether the name occurs, as a whole word, in the code that may read it. Reads gigabytes if it does not."""
    word = re.compile(rb"(?<!\w)" + name.encode() + rb"(?!\w)")
    return any(_contains(file, name.encode(), word) for file in _code())


@cache
def _code() -> tuple[Path, ...]:
    """Python files and libraries of the packages, and libraries of this process; small ones first."""
    import torch  # noqa: F401  (its libraries are then among the loaded ones)

    found = {path for folder in _folders() for path in folder.rglob("*") if _is_code(path)}
    found |= _loaded()
    sizes = {path: path.stat().st_size for path in found if path.is_file()}
    return tuple(sorted(sizes, key=lambda path: sizes[path]))


def _folders() -> Iterator[Path]:
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        yield from map(Path, spec.submodule_search_locations or () if spec else ())


def _is_code(path: Path) -> bool:
    return path.suffix in (".py", ".so") or ".so." in path.name


def _loaded() -> set[Path]:
    """Shared libraries mapped into this process: the C library, OpenMP, the driver."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line[line.index("/") :]) for line in lines if ".so" in line and "/" in line}


def _contains(file: Path, name: bytes, word: re.Pattern[bytes]) -> bool:
    """Whether a file contains the word; `name` alone is found many times faster."""
    kept = b""  # the end of the last chunk: the character before a word that reaches into the next, and its beginning
    try:
        with file.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                text = kept + chunk
                found = word.finditer(text, 1 if kept else 0) if name in text else ()
                if any(match.end() < len(text) or len(chunk) < _CHUNK_BYTES for match in found):
                    return True
                kept = text[-len(name) - 1 :]
    except OSError:
        pass
    return False


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


def _vector_instructions() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _tf32() -> str:
    import torch

    return f"torch.backends.cuda.matmul.allow_tf32={torch.backends.cuda.matmul.allow_tf32}"


_READERS: Mapping[str, Callable[[], str]] = {
    **dict.fromkeys(_ALLOCATOR, _allocator),
    "ATEN_CPU_CAPABILITY": _vector_instructions,
    "CUDA_LAUNCH_BLOCKING": _launches,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _tf32,
}
