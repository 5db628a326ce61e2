"""Waits until a point's GPUs are free again before they are handed to the next point."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import pynvml

from jobs.measure import nvml

_FREE_WITHIN_S = 30.0
_SLACK_BYTES = 256 << 20  # variation of the driver's own memory


def visible(gpus: str | None) -> list[str]:
    """GPU ids in a CUDA_VISIBLE_DEVICES value; None: all GPUs that this process sees."""
    if gpus is None:
        return nvml.visible_gpus()
    return [part.strip() for part in gpus.split(",") if part.strip()]


def card_name(gpu: str) -> str | None:
    """Name of a GPU, as the probe names the machine; None where NVML cannot say."""
    try:
        return nvml.describe(gpu).get("name")
    except (nvml.NvmlError, pynvml.NVMLError):
        return None


@dataclass(frozen=True)
class Baseline:
    """Bytes in use on each GPU before a child was started; None where NVML cannot say."""

    used: dict[str, int] | None

    @classmethod
    def take(cls, gpu_ids: Collection[str]) -> Baseline:
        try:
            with nvml.session():
                return cls({gpu: _used(gpu) for gpu in gpu_ids})
        except (nvml.NvmlError, pynvml.NVMLError):
            return cls(None)

    def wait_free(self, pids: Collection[int]) -> str | None:
        """Wait until no process of `pids` holds a CUDA context and the memory in use is back at the baseline.

        Returns:
            None once that is so (or NVML cannot say); after 30 s the obstacle, as a sentence.
        """
        deadline = time.monotonic() + _FREE_WITHIN_S
        while problem := self._obstacle(pids):
            if time.monotonic() > deadline:
                return f"{problem} after {_FREE_WITHIN_S:.0f} s; the next point on it may find less memory"
            time.sleep(0.2)
        return None

    def _obstacle(self, pids: Collection[int]) -> str | None:
        if not self.used:
            return None
        try:
            with nvml.session():
                for gpu, before in self.used.items():
                    if left := set(pids) & set(nvml.compute_pids(nvml.handle(gpu))):
                        return f"GPU {gpu} still lists process {min(left)} of the ended point"
                    # In a container NVML lists the host's process ids: only the memory is comparable.
                    if (excess := _used(gpu) - before) > _SLACK_BYTES:
                        return f"GPU {gpu} still has {excess >> 20} MiB more in use than before the point"
        except (nvml.NvmlError, pynvml.NVMLError):
            return None
        return None


def _used(gpu: str) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(nvml.handle(gpu)).used)
