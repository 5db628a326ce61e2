"""Waits until a point's GPUs are free again before they are handed to the next point.

NVML is asked in a thread, with a bound: where the driver is wedged, as by a kernel that never ends, it never answers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pynvml

from jobs.hardware import nvml
from orchestrator.background import BackgroundCall

T = TypeVar("T")

_FREE_WITHIN_S = 30.0
_SLACK_BYTES = 256 << 20  # variation of the driver's own memory
_ANSWER_S = 10.0  # without persistence mode the driver is loaded first
_STOPPED_S = 1.0

_unanswered: list[BackgroundCall[Any]] = []


class _SilentError(nvml.NvmlError):
    """NVML does not answer."""


def visible(gpus: str | None, stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """GPU ids in a CUDA_VISIBLE_DEVICES value; None: all GPUs that this process sees."""
    if gpus is not None:
        return [part.strip() for part in gpus.split(",") if part.strip()]
    try:
        return _answer(nvml.visible_gpus, stopped)
    except nvml.NvmlError:
        return []


def misfit(gpus: Sequence[str], planned: str | None, stopped: Callable[[], bool] = lambda: False) -> str | None:
    """Reason why a point that is planned for a card, as the probe named it, may not be measured on these GPUs.

    None if it may, and where NVML cannot say which they are.
    """
    for gpu in gpus if planned else ():
        try:
            card = _answer(lambda gpu=gpu: nvml.describe(gpu), stopped).get("name")
        except (nvml.NvmlError, pynvml.NVMLError):
            continue
        if card not in (planned, None):
            fix = "name one type in resources.accelerator_type, or with --local in CUDA_VISIBLE_DEVICES"
            return f"planned for {planned}, node {socket.gethostname()} has {card}; {fix}"
    return None


@dataclass(frozen=True)
class Baseline:
    """Bytes in use on each GPU before a child was started; None where NVML cannot say.

    Attributes:
        problem: an obstacle to report after the point: what is not known because NVML did not answer.
    """

    used: dict[str, int] | None
    problem: str | None = None

    @classmethod
    def take(cls, gpu_ids: Collection[str], stopped: Callable[[], bool] = lambda: False) -> Baseline:
        def used() -> dict[str, int]:
            with nvml.session():
                return {gpu: _used(gpu) for gpu in gpu_ids}

        if not gpu_ids:
            return cls({})
        try:
            return cls(_answer(used, stopped))
        except _SilentError as err:
            return cls(None, f"{err}; whether the point's GPUs are free is not known")
        except (nvml.NvmlError, pynvml.NVMLError):
            return cls(None)

    def wait_free(self, pids: Collection[int], stopped: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until no process of `pids` holds a CUDA context and the memory in use is back at the baseline.

        Args:
            stopped: polled several times a second; once true, 1 s is waited at most.

        Returns:
            None once that is so (or NVML cannot say); after 30 s the obstacle, as a sentence.
        """
        if not self.used:
            return self.problem
        begun, used = time.monotonic(), self.used
        while True:
            try:
                problem = _answer(lambda: _not_free(used, pids), stopped)
            except _SilentError as err:
                problem = f"{err}, and GPU {', '.join(used)} may be in use"
            except (nvml.NvmlError, pynvml.NVMLError):
                return None
            passed = time.monotonic() - begun
            if problem is None:
                return None
            if passed > (_STOPPED_S if stopped() else _FREE_WITHIN_S):
                return f"{problem} after {passed:.0f} s; the next point on it may find less memory"
            time.sleep(0.2)


def _not_free(used: dict[str, int], pids: Collection[int]) -> str | None:
    with nvml.session():
        for gpu, before in used.items():
            if holders := set(pids) & set(nvml.compute_pids(nvml.handle(gpu))):
                return f"GPU {gpu} still lists process {min(holders)} of the ended point"
            # In a container NVML lists the host's process ids: only the memory is comparable.
            if (excess := _used(gpu) - before) > _SLACK_BYTES:
                return f"GPU {gpu} still has {excess >> 20} MiB more in use than before the point"
    return None


def _used(gpu: str) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(nvml.handle(gpu)).used)


def _answer(question: Callable[[], T], stopped: Callable[[], bool]) -> T:
    """The answer of NVML. While a question has none, no other is asked: it would wait, too, and leave one more thread.

    Raises:
        NVMLError, NvmlError: as the question; _SilentError: there is no answer in time.
    """
    if any(not call.done() for call in _unanswered):
        raise _SilentError("NVML does not answer")
    call, begun = BackgroundCall(question), time.monotonic()
    while not call.done(0.1):
        if time.monotonic() - begun > (_STOPPED_S if stopped() else _ANSWER_S):
            _unanswered[:] = [call]
            raise _SilentError("NVML does not answer")
    return call.result()
