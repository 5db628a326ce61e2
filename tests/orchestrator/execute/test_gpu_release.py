"""GPUs that are handed on, where NVML does not answer: a bound, one question at a time, and a stop that ends it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from processes import wait_for

from jobs.hardware import nvml, telemetry
from jobs.specs.spec import Deadlines
from orchestrator.execute import gpu_release
from orchestrator.execute.gpu_release import Gpus
from orchestrator.execute.supervisor import Assignment, Conditions, supervise
from orchestrator.store.records import Progress

CUDA = Conditions("cuda", Deadlines(startup_s=60, heartbeat_s=60, point_s=120), card="NVIDIA H100")


class Driver:
    """A driver of one GPU that is free. NVML answers nothing while it is wedged."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def describe(self, gpu: str) -> dict[str, str]:
        with self.session():
            return {"name": "NVIDIA H100"}

    def sampler(self, gpu: str) -> object:
        raise nvml.NvmlError("takes no samples")

    @contextmanager
    def session(self) -> Iterator[None]:
        self.asked += 1
        if not self.answers.is_set():
            self.answers.wait(60)
            raise nvml.NvmlError("was wedged")
        yield


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(nvml, "session", made.session)
    monkeypatch.setattr(nvml, "handle", lambda gpu: gpu)
    monkeypatch.setattr(nvml, "compute_pids", lambda device: [])
    monkeypatch.setattr(nvml, "describe", made.describe)
    monkeypatch.setattr(telemetry, "GpuSampler", made.sampler)
    monkeypatch.setattr(gpu_release, "_used", lambda gpus: dict.fromkeys(gpus, 0))
    yield made
    made.answers.set()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_release, "_ANSWER_S", 0.3)
    monkeypatch.setattr(gpu_release, "_FREE_WITHIN_S", 1.0)


@pytest.mark.usefixtures("hasty")
def test_a_driver_that_is_wedged_after_a_point_is_the_obstacle(driver: Driver) -> None:
    gpus = Gpus("0")
    gpus.note_use()
    driver.answers.clear()
    before = driver.asked
    obstacle = gpus.wait_free({7})  # returns although the driver answers nothing
    assert re.fullmatch(
        r"NVML does not answer, and GPU 0 may be in use after \d+ s; the next point on it may find less memory",
        str(obstacle),
    )
    assert driver.asked == before + 1, "each question leaves a thread"
    driver.answers.set()
    wait_for(lambda: gpus.wait_free({7}) is None)


def test_a_stop_does_not_wait_for_a_wedged_driver(driver: Driver, snippet_kind, monkeypatch) -> None:
    for patience in ("_ANSWER_S", "_FREE_WITHIN_S"):
        monkeypatch.setattr(gpu_release, patience, 3600.0)
    stop = threading.Event()
    assignment = Assignment("r", "r/0", 1, snippet_kind.point("import time\nbeat('on')\ntime.sleep(600)"))
    for update in supervise([assignment] * 2, CUDA, "0", stop.is_set):
        if isinstance(update, Progress):
            driver.answers.clear()
            threading.Timer(0.3, stop.set).start()
    assert stop.is_set()
