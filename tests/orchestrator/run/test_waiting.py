"""A Ray job is a run from its submission on: pending while it waits, failed or cancelled where it never begins."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from processes import wait_for
from typer.testing import CliRunner

from jobs.schema.point import Machine
from jobs.specs.load import parse_spec
from orchestrator.background import BackgroundCall
from orchestrator.cli import submission
from orchestrator.cli.commands import app
from orchestrator.errors import ExecutorGone, UserError
from orchestrator.execute import ray_cluster, ray_connection, ray_folder
from orchestrator.execute.local import LocalExecutor
from orchestrator.execute.ray_connection import ClusterWatch
from orchestrator.run import driver
from orchestrator.settings import load_settings
from orchestrator.store import Store, importer, journal, queries
from orchestrator.store.records import RunRecord

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch, snippet_kind) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "raysubmit_1"}}')


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, submitted) -> Callable[[Callable[[], None]], None]:
    """Function that has the probe of a job do something while it waits for room."""

    def put(does: Callable[[], None]) -> None:
        def probe(self: LocalExecutor) -> dict[str | None, Machine]:
            does()
            return {None: Machine("cpu", "test", 8 << 30, {"torch": "0"})}

        monkeypatch.setattr(LocalExecutor, "probe", probe)

    return put


def only_run(home: Path) -> dict:
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False) as store:
        wait_for(lambda: bool(len(queries.runs(store))))  # the driver does not wait for the database
        [run_id] = queries.runs(store)["run_id"]
        found = queries.run(store, run_id)
        assert found is not None
        return {**found, "events": queries.events(store, run_id).message.tolist()}


def nsa(*args: str) -> str:
    return CliRunner().invoke(app, args).output


def fail(err: BaseException) -> None:
    raise err


def test_a_job_that_waits_for_room_is_a_pending_run(home, spec, waits, tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(submission, "log", lambda settings, job: f"the log of {job}")

    def look() -> None:
        seen.append((only_run(home), nsa("runs"), nsa("status"), nsa("show", "last"), nsa("logs", "last")))

    waits(look)
    assert driver.main([str(spec("pass", "pass")), "--local"]) == 0
    [(run, runs, status, shown, log)] = seen
    assert (run["state"], run["submission_id"], run["points"]) == ("pending", "raysubmit_1", 0)
    assert all("pending" in text and run["run_id"] in text for text in (runs, status, shown))
    assert log == "the log of raysubmit_1"
    now = only_run(home)
    assert (now["state"], now["points"], now["created_at"]) == ("done", 2, run["created_at"])
    path = home / "artifacts" / run["run_id"] / journal.NAME
    assert [record.state for record in journal.read(path) if isinstance(record, RunRecord)] == ["pending", "running"]
    with Store.open(f"sqlite:///{home / 'nsa.db'}") as store:  # the run that waited is the journal's
        importer.import_file(store, path)
    assert driver.main(["--local", "--resume", run["run_id"]]) == 0


@pytest.mark.parametrize("err", [UserError("resources.num_gpus: 8: no node has more"), ExecutorGone("went away")])
def test_a_job_that_fails_before_its_first_point_says_why(home, spec, waits, err) -> None:
    waits(lambda: fail(err))
    assert driver.main([str(spec("pass")), "--local"]) in (1, 2)
    run = only_run(home)
    assert run["state"] == "failed"
    assert run["events"] == [f"ended before its first point: {err}"]
    waits(lambda: None)
    assert driver.main(["--resume", run["run_id"], "--local"]) == 0
    assert only_run(home)["state"] == "done"


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_is_stopped_while_it_waits_is_cancelled(home, spec, waits, number) -> None:
    waits(lambda: os.kill(os.getpid(), number))
    assert driver.main([str(spec("pass")), "--local"]) == 130
    assert only_run(home)["state"] == "cancelled"


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, submitted) -> Iterator[socket.socket]:
    """The cluster of a job takes connections and answers nothing, as one whose head is frozen."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        yield head


@contextmanager
def greeting_head() -> Iterator[tuple[str, Callable[[int], None]]]:
    """The address of a head that greets its clients (RFC 9113, 3.4), then is frozen, and how to await the nth one."""
    clients: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):  # it is shut down
            while client := head.accept()[0]:
                clients.append(client)
                client.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))

    with socket.create_server(("127.0.0.1", 0)) as head:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{head.getsockname()[1]}", lambda count: wait_for(lambda: len(clients) >= count, 60)
        finally:
            head.shutdown(socket.SHUT_RDWR)
            thread.join()
            for client in clients:
                client.close()


def test_a_head_that_freezes_while_ray_connects_does_not_keep_a_driver(submitted, tmp_path) -> None:
    """In a process of its own, which must end although Ray's thread in it never does."""
    with greeting_head() as (address, await_client):
        env = os.environ | {"NSA_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "RAY_ADDRESS": address}
        env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray takes loopback for what it is
        command = [sys.executable, "-m", "jobs", "jobs/configs/drill.yaml"]
        driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        await_client(3)  # after two of our own: it is Ray's
        time.sleep(0.3)
        driver.terminate()
        out, err = driver.communicate(timeout=60)  # Ray alone would wait for minutes
    assert (driver.returncode, out, err) == (130, b"", b"")
    assert not list(tmp_path.glob("nsa-upload-*"))
    assert only_run(tmp_path)["state"] == "cancelled"


def test_a_cluster_that_says_nothing_is_told_in_a_line(home, spec, silent, capsys, monkeypatch) -> None:
    monkeypatch.setattr(ray_folder, "_REACH_S", 0.2)
    assert driver.main([str(spec("pass"))]) == 2
    assert re.fullmatch(r"error: NSA_RAY_ADDRESS: '127.*': takes connections, but .*\n", capsys.readouterr().err)
    run = only_run(home)
    assert run["state"] == "failed"
    assert "answers nothing" in run["events"][0]


GPUS_OF_TWO_TYPES = {
    "a": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:A100": 1.0},
    "h": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0},
}
A_GPU_AND_NONE = {"c": {"CPU": 64.0}, "h": {"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0}}
A_GPU_A_NODE = {name: {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 1.0} for name in ("h", "i")}


class Nodes:
    """A cluster that answers at once, and whose node "h" is probed; time passes as it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: dict[str, dict[str, float]]) -> None:
        self.nodes, self.clock, self.probed = dict(nodes), 0.0, True
        self.machine = Machine("cuda", "test", 8 << 30, {"torch": "0"})
        task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "answer"))
        monkeypatch.setattr(ray_cluster, "connect", lambda spec, settings: None)
        monkeypatch.setattr(ray_cluster, "_head", lambda: "127.0.0.1:1")
        monkeypatch.setattr(ray_cluster, "_nodes", lambda: dict(self.nodes))
        monkeypatch.setattr(ray_connection, "answers", lambda head: True)
        monkeypatch.setattr(ray_connection, "BackgroundCall", _done_at_once)
        monkeypatch.setattr(ray_connection.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(ray, "remote", lambda **_: lambda function: task)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", lambda answer: ("h", {None: self.machine}))

    def executor(self, **fields: Any) -> ray_cluster.RayExecutor:
        spec = {"kind": "train", "name": "t", "seq_len": 32, "steps": 20, "batch": 12, **fields}
        return ray_cluster.RayExecutor(parse_spec(spec), load_settings())

    def run_for(self, minutes: float, executor: ray_cluster.RayExecutor) -> None:
        until = self.clock + 60 * minutes
        while self.clock < until:
            self.clock += 5
            executor.poll(0)

    def _wait(self, answers: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        self.clock += 5
        assert self.clock < 3600, "waits without end"
        return (answers, []) if self.probed else ([], answers)


def _done_at_once(call: Callable[[], bool]) -> BackgroundCall[bool]:
    made = BackgroundCall(call)
    assert made.done(timeout=60)
    return made


@pytest.mark.parametrize(
    ("nodes", "fields", "lacks"),
    [
        (GPUS_OF_TWO_TYPES, {"device": "cuda"}, "no node of the cluster has the 1 GPU and 1 CPU cores on H100"),
        (A_GPU_AND_NONE, {"device": "auto"}, "no node of the cluster has the 1 GPU and 1 CPU cores on H100"),
        ({**GPUS_OF_TWO_TYPES, **A_GPU_A_NODE}, {"device": "cuda", "ranks": 2}, "ranks: 2: .* room for 1, .* on H100"),
    ],
    ids=["type", "auto", "ranks"],
)
def test_a_run_waits_for_the_room_that_its_points_ask_for(monkeypatch, nodes, fields, lacks) -> None:
    """Other nodes would do for the spec, but the points are planned for the card that was probed."""
    cluster = Nodes(monkeypatch, nodes)
    executor = cluster.executor(**fields)
    executor.slots(executor.probe()[None])
    cluster.run_for(20, executor)
    gone = cluster.nodes.pop("h")
    cluster.run_for(9, executor)
    cluster.nodes["h"] = gone  # it came back
    cluster.run_for(20, executor)
    del cluster.nodes["h"]
    with pytest.raises(ExecutorGone, match=f"waited 600 s for a node that can run a point: {lacks}"):
        cluster.run_for(11, executor)


def test_a_probe_waits_for_the_room_that_it_asks_for(monkeypatch) -> None:
    cluster = Nodes(monkeypatch, A_GPU_AND_NONE)
    executor = cluster.executor(device="auto")
    cluster.probed = False
    del cluster.nodes["h"]
    with pytest.raises(ExecutorGone, match="no node of the cluster has the 1 GPU and 1 CPU cores that a point"):
        executor.probe()
    assert 600 <= cluster.clock < 700


def test_a_head_that_is_silent_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray lets the question wait until it ends the driver, which then has recorded nothing."""
    clock, asked = [0.0], []
    monkeypatch.setattr(ray_connection.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_connection, "BackgroundCall", _done_at_once)
    monkeypatch.setattr(ray_connection, "answers", lambda head: clock[0] <= 20)
    watch = ClusterWatch("127.0.0.1:1", lambda: asked.append(clock[0]))
    while clock[0] < 55:
        clock[0] += 1
        watch.look()
    assert asked == [5, 10, 15, 20]
    clock[0] = 60
    with pytest.raises(ExecutorGone, match=r"its head at 127\.0\.0\.1:1 does not answer"):
        watch.look()


def test_a_frozen_head_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the question and never answers: a driver that waited would not answer SIGTERM."""
    clock, thaw = [0.0], threading.Event()
    monkeypatch.setattr(ray_connection.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_connection, "answers", lambda head: thaw.wait(60))
    watch = ClusterWatch("127.0.0.1:1", lambda: None)
    for seconds in (5, 34):
        clock[0] = seconds
        watch.look()
    clock[0] = 36
    with pytest.raises(ExecutorGone, match="does not answer"):
        watch.look()
    thaw.set()


def test_a_finished_run_stays_so_while_its_resume_waits(home, spec, waits) -> None:
    """Also where the resume is stopped, or fails, before it could tell that nothing is left to measure."""
    waits(lambda: None)
    assert driver.main([str(spec("pass")), "--local"]) == 0
    run_id, seen = only_run(home)["run_id"], []
    waits(lambda: seen.append(only_run(home)["state"]))
    assert driver.main(["--local", "--resume", run_id]) == 0
    assert seen == ["done"]
    waits(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert driver.main(["--local", "--resume", run_id]) == 130
    assert only_run(home)["state"] == "done"
    waits(lambda: fail(UserError("resources.num_gpus: 8: no node has more")))
    assert driver.main(["--local", "--resume", run_id]) == 2
    assert (only_run(home)["state"], only_run(home)["events"]) == ("done", [])


def test_a_resume_with_points_to_measure_is_pending_while_it_waits(home, spec, waits) -> None:
    waits(lambda: None)
    assert driver.main([str(spec("raise ValueError")), "--local"]) == 1
    run_id, seen = only_run(home)["run_id"], []
    waits(lambda: seen.append(only_run(home)["state"]))
    assert driver.main(["--local", "--resume", run_id]) == 1
    assert seen == ["done"]
    waits(lambda: wait_for(lambda: only_run(home)["state"] == "pending"))
    assert driver.main(["--local", "--resume", run_id, "--retry-failed"]) == 1


@pytest.mark.parametrize(
    ("job", "allowed", "seconds"),
    [(None, None, math.inf), ("raysubmit_1", "60", 57.0), ("raysubmit_1", None, 0.0), ("raysubmit_1", "3", 0.0)],
    ids=["no job", "a job with time", "a job", "a job with as much as by default"],
)
def test_points_that_save_a_checkpoint_are_waited_for_as_long_as_a_stop_may_take(
    monkeypatch: pytest.MonkeyPatch, job: str | None, allowed: str | None, seconds: float
) -> None:
    monkeypatch.setattr(ray_cluster.provenance, "submission_id", lambda: job)
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    if allowed is not None:
        monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", allowed)
    assert ray_cluster._time_to_stop() == seconds
