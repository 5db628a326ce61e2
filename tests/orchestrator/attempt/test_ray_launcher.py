"""The ends of ranks on a cluster, in words, and the metrics of their GPUs; tests/e2e/test_ray_ranks.py has the rest."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train import ControllerError, WorkerGroupError
from waiting import wait_for

from jobs._training.rank import PROCESS_GROUP
from jobs.launcher import RanksEnded
from jobs.measure.gpu_samples import Sample
from jobs.measure.telemetry import Telemetry, energy
from jobs.point import Measurement, Metric, Reading
from jobs.quantities import GPU_POWER, GPU_UTILIZATION
from orchestrator.attempt import protocol
from orchestrator.attempt.ray_launcher import RayLauncher, _driver, _ended, _Found
from orchestrator.attempt.ray_rank import NodeWatch, Placed, Raised, RankRaised, _Post


@pytest.fixture
def found() -> _Found:
    """Two ranks that have begun on two nodes."""
    found = _Found(2, lambda _: None)
    for number, host in enumerate(("a", "b")):
        found.note(Placed(number, f"id-{host}", host, 17, None, "/tmp/none", {}))
    return found


def test_a_rank_that_died_is_told_from_one_that_raised(found: _Found) -> None:
    found.note(Raised(0, "Traceback ..."))
    died = RayActorError(None, "the node was running low on memory")
    end = _ended(WorkerGroupError("2 failed", {1: died, 0: RankRaised("RuntimeError: peer closed")}), found)
    assert isinstance(end, RanksEnded)
    assert list(end.died) == [1]
    assert end.died[1].startswith("died on node b: ")
    assert list(end.out_of_memory) == [1]
    assert end.tails == {0: "Traceback ..."}


def test_a_lost_node_is_told_from_the_exception_of_a_rank_that_missed_it(found: _Found) -> None:
    found.note(Raised(1, "Traceback ..."))
    error = WorkerGroupError("1 failed", {1: RankRaised("RuntimeError: Connection closed by peer")})
    assert dict(_ended(error, found).died) == {}
    end = _ended(error, found, {"id-a"})
    assert dict(end.died) == {0: "was lost with node a"}
    assert dict(_ended(error, found, {"id-b"}).died) == {}, "rank 1 has told its end"


def test_ranks_that_could_not_be_started_are_told_with_the_reason(found: _Found) -> None:
    end = _ended(ControllerError(ValueError("no such package")), found)
    assert str(end) == "Ray Train could not start the ranks: no such package"
    assert str(_ended(None, found)) == "Ray Train failed: no reason given"


def test_metrics_of_all_ranks_gpus_are_added_to_those_that_are_there() -> None:
    launcher = RayLauncher(protocol.Run("train", {}, "cuda", None), protocol.Cluster(1, 1), lambda _: None)
    there = Measurement((Metric.of(GPU_UTILIZATION, 50.0),))
    assert launcher.metered(there) is there
    launcher.samples = [
        Sample(gpu, number, 0.2 * number, 90.0, 1000.0, power, 1500.0, 40.0, 0, (1,))
        for number in range(3)
        for gpu, power in (("a:0", 300.0), ("b:0", 100.0))
    ]
    metered = launcher.metered(there)
    values = {metric.name: metric.value for metric in metered.metrics}
    assert values[GPU_UTILIZATION.name] == 50.0
    assert values[GPU_POWER.name] == pytest.approx(200.0)
    assert "GPU a:0" in str(metered.files["telemetry.txt"])
    assert "GPU b:0" in str(metered.files["telemetry.txt"])


def _take_pieces(monkeypatch: pytest.MonkeyPatch, pieces: Sequence[list[Sample]]) -> RayLauncher:
    """The launcher that has taken in the samples of ranks that were started again and again."""
    launcher = RayLauncher(protocol.Run("soak", {}, "cuda", None), protocol.Cluster(1, 1), lambda _: None)
    for piece in pieces:
        monkeypatch.setattr("orchestrator.attempt.ray_launcher._answers", lambda asked, piece=piece: {"id-a": piece})
        launcher._take_samples()
    return launcher


def _piece(samples: int, utilization: float, gpu: str = "a:0", weight: int = 1) -> list[Sample]:
    """Samples of one start of a rank, of a second for each weight and of 100 W."""
    told = (utilization, 1000.0, 100.0, 1500.0, 40.0, 0, (1,), 0.0, 1)
    seconds = [0.0, *[float(weight)] * (samples - 1)]
    return [Sample(gpu, n, s, *told, 100 * s if s else None, weight) for n, s in enumerate(seconds)]


def test_energy_of_ranks_that_were_started_again_is_that_of_all_without_the_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A soak's pieces and restarts; meanwhile others may have had the card."""
    pieces = [_piece(3, 90), _piece(3, 90, "b:0"), _piece(3, 90)]
    launcher = _take_pieces(monkeypatch, pieces)
    assert energy(launcher.samples) == pytest.approx(3 * 200)
    assert "GPU a:0: 6 samples over 4.0 s" in str(launcher.metered(Measurement(())).files["telemetry.txt"])


def test_samples_of_many_pieces_are_bounded_and_weigh_by_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.measure.gpu_samples.MOST", 50)
    pieces = [_piece(2, 0.0), _piece(40, 90.0, weight=4), *(_piece(3, 10.0) for _ in range(20))] * 5
    launcher = _take_pieces(monkeypatch, pieces)
    assert len(launcher.samples) <= 50
    assert sum(sample.weight for sample in launcher.samples) == 5 * (2 + 160 + 60)
    assert energy(launcher.samples) == pytest.approx(5 * 100 * (1 + 4 * 39 + 2 * 20))
    values = {metric.name: metric.value for metric in launcher.metered(Measurement(())).metrics}
    assert values[GPU_UTILIZATION.name] == pytest.approx(90.0), "the middle of the time"


def test_live_readings_become_rarer_through_all_pieces_of_a_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a single process: thousands for ten hours, not for each."""
    clock, asked = 0.0, []
    monkeypatch.setattr("orchestrator.attempt.ray_launcher.time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(ray, "wait", lambda answers, **_: (answers, []))
    monkeypatch.setattr(ray, "get", lambda answer: [answer])
    reading = Reading(0, 1, 0.0, {GPU_UTILIZATION: 50.0})
    watch = SimpleNamespace(readings=SimpleNamespace(remote=lambda: asked.append(clock) or reading))
    told: list[Any] = []
    launcher = RayLauncher(protocol.Run("soak", {}, "cuda", None), protocol.Cluster(1, 1), told.append)
    fit = SimpleNamespace(is_alive=lambda: clock < ends)
    mailbox = SimpleNamespace(taken=SimpleNamespace(remote=lambda _: tick()))
    monkeypatch.setattr("orchestrator.attempt.ray_launcher._watch_nodes", lambda *_: {"id-a": watch})

    def tick() -> Any:
        nonlocal clock
        clock += 0.5
        return Placed(0, "id-a", "a", 17, "0", "/tmp/none", {})

    for piece in range(1, 11):
        ends = 3600 * piece
        launcher._follow(fit, _Found(1, lambda _: None), mailbox, Event(), lambda _: None)
    assert 5000 < len(asked) < 9000
    assert len(told) >= len(asked) - 10


def test_readings_of_ranks_that_were_started_again_have_numbers_of_their_own() -> None:
    """The store keeps one sample of a number."""
    numbers: list[int] = []
    for _ in range(2):
        here = [Placed(rank, "id", "here", os.getpid(), None, "/tmp/none", {}) for rank in (0, 1)]
        watch = NodeWatch(here, 1, max(numbers, default=-1))
        until = len(numbers) + 2
        while len(numbers) < until:
            numbers += [reading.number for reading in watch.readings() if reading.rank == 0]
            time.sleep(0.05)
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 4


def test_samplings_of_a_nodes_gpus_end_as_fast_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point's process waits 15 s for a node's samples, and a look at a busy card takes its time."""

    class Slow(Telemetry):
        def start(self) -> None:
            self._thread = threading.Thread(target=lambda: self._stop.wait() and time.sleep(0.5))
            self._thread.start()

        @property
        def samples(self) -> list[Sample]:
            assert self._thread is not None
            assert not self._thread.is_alive()
            return _piece(1, 90.0, self._gpu_ids[0])

    monkeypatch.setattr("orchestrator.attempt.ray_rank.Telemetry", Slow)
    here = [Placed(rank, "id", "here", os.getpid(), str(rank), "/tmp/none", {}) for rank in range(8)]
    watch, asked = NodeWatch(here, 1, -1), time.monotonic()
    samples = watch.samples()
    assert time.monotonic() - asked < 1.5
    assert {sample.gpu for sample in samples} == {f"{socket.gethostname()}:{rank}" for rank in range(8)}


def test_messages_of_a_rank_outlast_a_fault_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[Any] = []
    faults = [ActorUnavailableError("away", b"0" * 16)] * 3

    def get(messages: list[Any]) -> bool:
        if messages and faults:
            raise faults.pop()
        arrived.extend(messages)
        return False

    monkeypatch.setattr(ray, "get", get)
    mailbox = SimpleNamespace(post=SimpleNamespace(remote=lambda messages: messages))
    post = _Post(mailbox, Event())
    post("first")
    wait_for(lambda: len(faults) < 3, 20)
    post("second")
    post.close()
    assert arrived == ["first", "second"]


def test_process_group_variables_of_a_point_a_job_and_a_node_win_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **options: environments.append(options["runtime_env"]["env_vars"]))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    name, job = "TORCH_NCCL_HIGH_PRIORITY", {"env_vars": {"TORCH_NCCL_HIGH_PRIORITY": "job"}}

    def variables(node: dict[str, str], **cluster: Any) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if key not in PROCESS_GROUP}
        with patch.dict(os.environ, own | node, clear=True), _driver(protocol.Cluster(1, 1, **cluster), Event()):
            return environments[-1]

    assert PROCESS_GROUP.items() <= variables({}).items()
    assert name not in variables({name: "node"}), "the ranks inherit it"
    assert variables({name: "node"}, runtime_env=job)[name] == "job"
    assert variables({name: "node"}, runtime_env=job, env_vars={name: "point"})[name] == "point"


def test_sigterm_while_ray_connects_ends_the_ranks_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_as_rays_handler(**_: Any) -> None:
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", exit_as_rays_handler)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    stop = Event()
    with pytest.raises(RanksEnded), patch.dict(os.environ), _driver(protocol.Cluster(1, 1), stop):
        pass
    assert stop.is_set()


def test_the_points_own_handler_of_sigterm_stays_once_ray_has_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    before, noted = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    try:
        signal.signal(signal.SIGTERM, lambda *_: noted.append(True))
        with patch.dict(os.environ), _driver(protocol.Cluster(1, 1), Event()):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [True]
