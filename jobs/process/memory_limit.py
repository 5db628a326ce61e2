"""Limits of the memory that a process may use, enforced in that process."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from jobs.schema.point import Device


def gpu_share(device: str) -> float | None:
    """Share of a GPU's memory that this process may use, to hand on to its own processes; None without a limit."""
    torch = sys.modules.get("torch")
    # A process that has not initialised CUDA has no limit, and leaves CUDA to its own processes.
    if device != "cuda" or torch is None or not torch.cuda.is_initialized():
        return None
    share = torch.cuda.get_per_process_memory_fraction()
    return share if share < 1 else None


@contextlib.contextmanager
def memory_limit(device: Device, limit: int | None) -> Iterator[None]:
    """Limit the block's memory: on CUDA to `limit` bytes of the card, on a CPU to `limit` private bytes beyond now."""
    if limit is None:
        yield
    elif device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)
    elif sys.platform != "linux":  # not enforced
        yield
    else:
        import resource

        # RLIMIT_DATA counts private writable mappings only; RLIMIT_AS would also count libraries and reservations.
        status = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        target = used + limit if hard == resource.RLIM_INFINITY else min(used + limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (target, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
