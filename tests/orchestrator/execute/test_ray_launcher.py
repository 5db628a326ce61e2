"""The ends of ranks on a cluster, in words, and the metrics of their GPUs; tests/e2e/test_ray_ranks.py has the rest."""

import os
import pickle
import signal
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import ray
from processes import wait_for
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.train import WorkerGroupError

from jobs.process.messages import Cluster
from jobs.schema.point import RanksEnded
from orchestrator.execute.ray_launcher import RankProgress, driver, end_of_ranks
from orchestrator.execute.ray_rank import Placed, Post, RankRaised


@pytest.fixture
def progress() -> RankProgress:
    """Two ranks that have begun on two nodes."""
    progress = RankProgress()
    for number, host in enumerate(("a", "b")):
        progress.placed[number] = Placed(number, f"id-{host}", host, 17, f"{number}", "/tmp/none", {})
    return progress


def test_a_rank_that_died_is_told_from_one_that_raised(progress: RankProgress) -> None:
    progress.tails[0] = "Traceback ..."
    died = RayActorError(None, "the node was running low on memory")
    end = end_of_ranks(WorkerGroupError("2 failed", {1: died, 0: RankRaised("RuntimeError: peer closed")}), progress)
    assert isinstance(end, RanksEnded)
    assert list(end.died) == [1]
    assert end.cards[1] == "GPU 1 of b"
    assert end.died[1].startswith("died on node b: ")
    assert list(end.out_of_memory) == [1]
    assert end.tails == {0: "Traceback ..."}


def test_a_lost_node_is_told_from_the_exception_of_a_rank_that_missed_it(progress: RankProgress) -> None:
    progress.tails[1] = "Traceback ..."
    error = WorkerGroupError("1 failed", {1: RankRaised("RuntimeError: Connection closed by peer")})
    assert dict(end_of_ranks(error, progress).died) == {}
    end = end_of_ranks(error, progress, {"id-a"})
    assert dict(end.died) == {0: "was lost with node a"}
    assert dict(end_of_ranks(error, progress, {"id-b"}).died) == {}, "rank 1 has told its end"


def test_messages_of_a_rank_outlast_a_fault_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[Any] = []
    faults = [ActorUnavailableError("away", b"0" * 16)] * 3

    def get(messages: list[Any]) -> bool:
        if messages and faults:
            raise faults.pop()
        arrived.extend(map(pickle.loads, messages))
        return False

    monkeypatch.setattr(ray, "get", get)
    mailbox = SimpleNamespace(post=SimpleNamespace(remote=lambda messages: messages))
    post = Post(mailbox, Event())
    post("first")
    wait_for(lambda: len(faults) < 3, 20)
    post("second")
    post.close()
    assert arrived == ["first", "second"]


def test_sigterm_while_ray_connects_ends_the_ranks_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_as_rays_handler(**_: Any) -> None:
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", exit_as_rays_handler)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    stop = Event()
    with pytest.raises(RanksEnded), patch.dict(os.environ), driver(Cluster(1, 1), stop):
        pass
    assert stop.is_set()
