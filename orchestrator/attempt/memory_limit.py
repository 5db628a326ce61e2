"""Limit of the memory that a measurement may use, enforced in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jobs.schema.point import Device


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
    else:
        with _data_limit(limit):
            yield


@contextlib.contextmanager
def _data_limit(limit: int) -> Iterator[None]:
    # RLIMIT_DATA counts private writable mappings only; RLIMIT_AS would also count libraries and reservations.
    try:
        import resource

        status = Path("/proc/self/status").read_text()
    except (ImportError, OSError):  # not Linux: not enforced
        yield
        return
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    target = used + limit if hard == resource.RLIM_INFINITY else min(used + limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (target, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
