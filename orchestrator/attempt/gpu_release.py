"""The GPUs of a point, seen from the process that watches it: sampled while it runs, free before they are handed on."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import pynvml

from jobs.measure import nvml

_FREE_WITHIN_S = 30.0
_SLACK_BYTES = 256 << 20  # the driver's own bookkeeping varies by this much


def visible(gpus: str | None) -> list[str]:
    """Ids of the GPUs in a CUDA_VISIBLE_DEVICES value; None: those that this process sees."""
    if gpus is None:
        return nvml.visible_gpus()
    return [part.strip() for part in gpus.split(",") if part.strip()]


@dataclass(frozen=True)
class Baseline:
    """Memory in use on each GPU before a child was started, in bytes; None where NVML cannot say."""

    used: dict[str, int] | None

    @classmethod
    def take(cls, gpu_ids: Collection[str]) -> Baseline:
        try:
            with nvml.session():
                return cls({gpu: _used(gpu) for gpu in gpu_ids})
        except (nvml.NvmlError, pynvml.NVMLError):
            return cls(None)

    def wait_free(self, pids: Collection[int]) -> str | None:
        """Wait until none of `pids` holds a context and the memory is back to what it was.

        Returns:
            None once that is so (or NVML cannot say), else what is still in the way after the bounded wait.
        """
        deadline = time.monotonic() + _FREE_WITHIN_S
        while problem := self._in_the_way(pids):
            if time.monotonic() > deadline:
                return f"{problem} after {_FREE_WITHIN_S:.0f} s; the next point on it may find less memory"
            time.sleep(0.2)
        return None

    def _in_the_way(self, pids: Collection[int]) -> str | None:
        if not self.used:
            return None
        try:
            with nvml.session():
                for gpu, before in self.used.items():
                    if left := set(pids) & set(nvml.compute_pids(nvml.handle(gpu))):
                        return f"GPU {gpu} still lists process {min(left)} of the ended point"
                    # In a container NVML lists the host's process ids, so that only the memory tells.
                    if (excess := _used(gpu) - before) > _SLACK_BYTES:
                        return f"GPU {gpu} still has {excess >> 20} MiB more in use than before the point"
        except (nvml.NvmlError, pynvml.NVMLError):
            return None
        return None


def _used(gpu: str) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(nvml.handle(gpu)).used)
