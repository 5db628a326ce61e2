"""GPUs that are handed on, where NVML does not answer: a bound, one question at a time, and a stop that ends it."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from made_up_runs import planned
from processes import wait_for
from sqlalchemy import delete

from jobs.hardware import nvml, telemetry
from jobs.schema.point import Point
from jobs.schema.states import RunState
from jobs.specs.spec import Deadlines
from orchestrator.execute import gpu_release, supervisor
from orchestrator.execute.gpu_release import Gpus
from orchestrator.execute.supervisor import Assignment, Conditions, process_variables, supervise
from orchestrator.store import Store, models, queries
from orchestrator.store.records import OutcomeRecord, Progress, RunEndRecord, RunRecord, StartRecord

CUDA = Conditions("cuda", Deadlines(startup_s=60, heartbeat_s=60, point_s=120), card="NVIDIA H100")


class Driver:
    """A driver of one GPU that is free. NVML answers nothing while it is wedged."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = 0

    def describe(self, gpu: str) -> dict[str, str]:
        with self.session():
            return {"name": "NVIDIA H100", "uuid": "GPU-7", "index": gpu}

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


@pytest.mark.usefixtures("driver")
def test_a_point_that_dies_before_it_says_where_it_is_names_its_card(
    monkeypatch: pytest.MonkeyPatch, sqlite_store: Store
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER", "os:abort")
    updates = list(supervise([Assignment("r", "r/0", 1, Point("x", "", {}))], CUDA, "3"))
    [start] = [update for update in updates if isinstance(update, StartRecord)]
    [outcome] = [update for update in updates if isinstance(update, OutcomeRecord)]
    at = start.at
    run = RunRecord(run_id="r", at=at, name="r", kind="x", spec={}, spec_hash="5")
    end = RunEndRecord(run_id="r", at=outcome.at, state=RunState.DONE)
    for ranks, place in ((None, f"on GPU 3 (GPU-7) of {start.node}"), (2, "")):
        plan = planned("r", 0, "nsa", 64, at, {"device": "cuda", "ranks": ranks})
        sqlite_store.apply_many([run, plan, start, outcome, end])
        assert queries.points(sqlite_store, "r")["failed_on"].tolist() == [place]
        assert place in queries.reasons(sqlite_store, ["r"])["r"]
        with sqlite_store.session(writes=True) as session:
            session.execute(delete(models.Run))


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


def test_a_point_counts_gpus_as_the_driver_does_whatever_the_host_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert process_variables(1, "1")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
