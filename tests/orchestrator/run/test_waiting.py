"""A Ray job is a run from its submission on: pending while it waits, failed or cancelled where it never begins."""

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

import pytest
from processes import wait_for
from typer.testing import CliRunner

from jobs.schema.point import Machine
from orchestrator.cli import submission
from orchestrator.cli.commands import app
from orchestrator.errors import ExecutorGone, UserError
from orchestrator.execute import ray_access, ray_connection
from orchestrator.execute.local import LocalExecutor
from orchestrator.execute.ray_connection import ClusterWatch
from orchestrator.run import driver
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
    monkeypatch.setattr(submission, "log", lambda settings, job, follow: [f"the log of {job}"])

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
    monkeypatch.setattr(ray_access, "_REACH_S", 0.2)
    assert driver.main([str(spec("pass"))]) == 2
    assert re.fullmatch(r"error: NSA_RAY_ADDRESS: '127.*': takes connections, but .*\n", capsys.readouterr().err)
    run = only_run(home)
    assert run["state"] == "failed"
    assert "answers nothing" in run["events"][0]


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
