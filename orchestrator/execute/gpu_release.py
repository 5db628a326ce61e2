"""The GPUs of a slot: which they are, and whether they are free again before the next point gets them.

NVML is asked in a thread, with a bound: where the driver is wedged, as by a kernel that never ends, it never answers.
"""

import socket
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import pynvml

from jobs.hardware import nvml
from orchestrator.background import in_background

T = TypeVar("T")

_FREE_WITHIN_S = 30.0
_SLACK_BYTES = 256 << 20  # variation of the driver's own memory
_ANSWER_S = 10.0  # without persistence mode the driver is loaded first
_STOPPED_S = 1.0


class _SilentError(nvml.NvmlError):
    """NVML does not answer."""


class Gpus:
    """The GPUs that the processes of a slot see: by their CUDA_VISIBLE_DEVICES, or all that this process sees.

    `stopped` is polled several times a second; once true, NVML is waited for 1 s at most.
    """

    def __init__(self, visible: str | None, stopped: Callable[[], bool] = lambda: False) -> None:
        self._stopped = stopped
        self._unanswered: Future[Any] | None = None
        self._used: dict[str, int] = {}  # bytes in use before the slot's process; {}: unknown
        self.cards: list[dict[str, str]] = []  # what NVML says of them, once a point was planned for a card
        self._problem: str | None = None  # why it is unknown, if NVML did not answer
        self.ids = [part.strip() for part in (visible or "").split(",") if part.strip()]
        if visible is None:
            self.ids = self._ask(nvml.visible_gpus, [])

    def misfit(self, planned: str | None) -> str | None:
        """Reason why a point that is planned for a card, as the probe named it, may not be measured on these GPUs.

        None if it may, and where NVML cannot say which they are.
        """
        self.cards = self._ask(lambda: [nvml.describe(gpu) for gpu in self.ids], []) if planned else []
        other = next((name for card in self.cards if (name := card.get("name")) not in (planned, None)), None)
        if other is None:
            return None
        fix = "name one type in resources.accelerator_type, or with --local in CUDA_VISIBLE_DEVICES"
        return f"planned for {planned}, node {socket.gethostname()} has {other}; {fix}"

    def note_use(self) -> None:
        """Note the memory in use, before a process of the slot is started."""
        self._problem = None
        try:
            self._used = self._ask(lambda: _used(self.ids), {}, silent_is_error=True) if self.ids else {}
        except _SilentError as err:
            self._used, self._problem = {}, f"{err}; whether the point's GPUs are free is not known"

    def wait_free(self, pids: Collection[int]) -> str | None:
        """Wait until no process of `pids` holds a CUDA context and the memory in use is what it was before.

        Returns None once that is so, or NVML cannot say; after 30 s the obstacle, as a sentence.
        """
        begun, problem = time.monotonic(), self._problem
        while self._used:
            try:
                problem = self._ask(lambda: self._obstacle(pids), None, silent_is_error=True)
            except _SilentError as err:
                problem = f"{err}, and GPU {', '.join(self._used)} may be in use"
            passed = time.monotonic() - begun
            if problem is None:
                return None
            if passed > (_STOPPED_S if self._stopped() else _FREE_WITHIN_S):
                return f"{problem} after {passed:.0f} s; the next point on it may find less memory"
            time.sleep(0.2)
        return problem

    def _obstacle(self, pids: Collection[int]) -> str | None:
        with nvml.session():
            for gpu in self.ids:
                if holders := set(pids) & set(nvml.compute_pids(nvml.handle(gpu))):
                    return f"GPU {gpu} still lists process {min(holders)} of the ended point"
        # In a container NVML lists the host's process ids: only the memory is comparable.
        for gpu, used in _used(self.ids).items():
            if (excess := used - self._used[gpu]) > _SLACK_BYTES:
                return f"GPU {gpu} still has {excess >> 20} MiB more in use than before the point"
        return None

    def _ask(self, question: Callable[[], T], unknown: T, *, silent_is_error: bool = False) -> T:
        """The answer of NVML, `unknown` if it has none. Raises _SilentError where it is late and that is asked for.

        While an answer is missing, no other question is put: it would wait, too, in one more thread.
        """
        if self._unanswered is None or self._unanswered.done():
            call, begun = in_background(question), time.monotonic()
            while not wait([call], 0.1).done:
                if time.monotonic() - begun > (_STOPPED_S if self._stopped() else _ANSWER_S):
                    self._unanswered = call
                    break
            else:
                try:
                    return call.result()
                except (nvml.NvmlError, pynvml.NVMLError):
                    return unknown
        if silent_is_error:
            raise _SilentError("NVML does not answer")
        return unknown


def _used(gpus: Sequence[str]) -> dict[str, int]:
    """Bytes in use on each GPU."""
    with nvml.session():
        return {gpu: int(pynvml.nvmlDeviceGetMemoryInfo(nvml.handle(gpu)).used) for gpu in gpus}
