"""The protocol of supervisor and worker: round trips, malformed lines, a worker of another version."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jobs.schema import point
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from orchestrator.attempt import protocol, supervisor
from orchestrator.attempt.child import Child, Violation
from orchestrator.attempt.protocol import ProtocolError
from orchestrator.messages import Assignment, Conditions
from orchestrator.store.records import OutcomeRecord

ROOT = Path(__file__).resolve().parents[3]
CONDITIONS = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=60, point_s=120))
METRICS = (point.Metric("time", "ms", 2.5, (2.0, 3.0), p10=2.1, method="events"), point.Metric("loss", "1", -1.0))
COMMANDS = [
    protocol.Probe("auto"),
    protocol.Run("scaling", {"lengths": [512, None], "nsa": {"window": 64}}, "cuda", 1 << 40),
    protocol.Run("scaling", {}, "cpu", None),
    protocol.Run("train", {}, "cpu", None, surroundings=point.Surroundings("s3://bucket/run/0000/checkpoints")),
    protocol.Run("train", {}, "cuda", None, cluster=protocol.Cluster(0.5, 1, "H100", "10.0.0.1:6379", {"pip": ["a"]})),
    protocol.Explain(),
    protocol.Exit(),
]
EVENTS = [
    protocol.Ready(17),
    protocol.Beat("timing – ü\n", 1, 2),
    protocol.Samples(1, 1 << 40, 1795435243.343, {"loss": 2.5}, {"loss": "nat/byte"}),
    protocol.Environment({"gpu": {"uuid": "GPU-1"}, "threads": 2, "cuda": None}),
    protocol.Machine(point.Machine("cuda", "H100", 80 << 30, {"torch": "2.13"})),
    protocol.Result(
        point.Measurement(METRICS, {"cmp": "chunked"}, {"host": "a"}), (protocol.File("stages.txt", "/tmp/file-1"),)
    ),
    protocol.Ranks((41, 43)),
    protocol.Noted("rank0.json", '{"rank":0}\n'),
    protocol.Explained((protocol.File("stacks-rank0.txt", "/tmp/file-3"),)),
    protocol.Failure(
        PointState.OOM,
        "OutOfMemoryError: CUDA out of memory",
        (protocol.File("\udcff\0", "/tmp/file-2"), protocol.File("a.txt", "", "the disk is full")),
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_survives_its_line(command: protocol.Command) -> None:
    line = protocol.encode(command)
    assert line.count(b"\n") == 1
    assert protocol.decode_command(line) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_its_line(event: protocol.Event) -> None:
    line = protocol.encode(event)
    assert line.count(b"\n") == 1
    assert protocol.decode_event(line) == event


def test_a_jobs_own_types_become_numbers_and_text() -> None:
    value: float = np.float32(2.5)  # type: ignore[assignment]  # a job that forgot to convert
    measurement = point.Measurement((point.Metric("time", "ms", value),), environment={"n": np.int64(3), "at": ROOT})
    event = protocol.decode_event(protocol.encode(protocol.Result(measurement)))
    assert isinstance(event, protocol.Result)
    assert event.measurement.metrics[0].value == 2.5
    assert event.measurement.environment == {"n": 3, "at": str(ROOT)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "b'nonsense' is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "its type is not one of ready, beat, environment, machine, result, failure"),
        (b'{"type": "run"}', "its type is not one of ready"),
        (b'{"type": ["beat"]}', "its type is not one of ready"),
        (b'{"type": "beat", "phase": "x", "done": 1}', "beat: lacks total"),
        (b'{"type": "beat", "phase": "x", "done": 1, "total": 1, "of": 2}', "beat: has unknown fields: of"),
        (b'{"type": "beat", "phase": "x", "done": 1.5, "total": 2}', "beat.done: 1.5 is not of type int"),
        (b'{"type": "beat", "phase": null, "done": 1, "total": 2}', "beat.phase: None is not of type str"),
        (b'{"type": "failure", "state": "odd", "reason": "", "files": []}', "failure.state: 'odd' is not of type"),
        (b'{"type": "failure", "state": "oom", "reason": "", "files": [1]}', "failure.files[0]: 1 is not"),
    ],
)
def test_a_malformed_line_is_an_error_that_says_which(line: bytes, message: str) -> None:
    with pytest.raises(ProtocolError) as error:
        protocol.decode_event(line)
    assert message in str(error.value)


def test_a_malformed_part_of_a_result_is_named() -> None:
    data = json.loads(protocol.encode(EVENTS[5]))
    data["measurement"]["metrics"][1]["samples"] = [1.0, "2"]
    with pytest.raises(ProtocolError, match=r"result\.measurement\.metrics\[1\]\.samples\[1\]: '2' is not"):
        protocol.decode_event(json.dumps(data).encode())


def test_ready_of_a_later_version_can_be_read() -> None:
    line = b'{"type": "ready", "pid": 17, "version": 99, "python": "3.15"}'
    assert protocol.decode_event(line) == protocol.Ready(17, 99)


def measure(snippet_kind, *codes: str, warm: bool = False) -> list[OutcomeRecord]:
    conditions = Conditions("cpu", CONDITIONS.deadlines, warm=warm)
    assignments = [Assignment("r", f"r/{i}", 1, snippet_kind.point(code, i)) for i, code in enumerate(codes)]
    return [update for update in supervisor.supervise(assignments, conditions) if isinstance(update, OutcomeRecord)]


def test_a_worker_of_another_version_ends_the_point_with_the_reason(snippet_kind, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "VERSION", protocol.VERSION + 1)  # here, not in the worker
    [outcome] = measure(snippet_kind, "pass")
    assert outcome.state is PointState.ERROR
    assert f"speaks version {protocol.VERSION - 1} of the protocol" in str(outcome.reason)
    with pytest.raises(supervisor.ProbeError, match="of the protocol"):
        supervisor.probe(protocol.Probe("cpu"))


@pytest.mark.parametrize("warm", [False, True])
def test_a_malformed_event_ends_its_point_and_the_next_one_is_measured(snippet_kind, warm: bool) -> None:
    code = "import time\nos.write(int(sys.argv[1]), b'nonsense\\n')\ntime.sleep(600)"
    outcomes = measure(snippet_kind, "pass", code, "pass", warm=warm)
    assert [outcome.state for outcome in outcomes] == [PointState.OK, PointState.ERROR, PointState.OK]
    assert str(outcomes[1].reason).startswith("the worker sent an unreadable event: b'nonsense' is not JSON")


def test_a_result_of_the_wrong_type_ends_its_point(snippet_kind) -> None:
    outcomes = measure(snippet_kind, "files = {'a.txt': 1}", "pass")
    assert [outcome.state for outcome in outcomes] == [PointState.ERROR, PointState.OK]
    assert outcomes[0].reason == "TypeError: files['a.txt']: int is neither a text nor the Path of a file"


@pytest.fixture
def child(snippet_kind) -> Iterator[Child]:
    started = Child(threads=1)
    yield started
    started.discard()


def next_event(child: Child) -> protocol.Event | Violation:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if events := child.events(0.2):
            return events[0]
    raise AssertionError("the worker is silent")


def test_a_worker_reports_a_command_that_it_cannot_read_and_goes_on(child: Child) -> None:
    assert next_event(child) == protocol.Ready(child.pid)
    stdin = child._process.stdin
    assert stdin is not None
    stdin.write(b'{"type": "rest"}\n')
    stdin.flush()
    failure = next_event(child)
    assert isinstance(failure, protocol.Failure)
    assert failure.reason.startswith("the worker cannot read its command: ")
    assert "its type is not one of probe, run, explain, exit" in failure.reason
    child.send(protocol.Run("snippet", {"code": "pass"}, "cpu", None))
    assert isinstance(next_event(child), protocol.Environment | protocol.Result)


def test_a_worker_that_does_not_say_ready_is_refused(child: Child, monkeypatch) -> None:
    monkeypatch.setattr(protocol, "decode_event", lambda line: protocol.Beat("on", 0, 0))
    assert next_event(child) == Violation("the worker sent Beat before Ready; its version is unknown")


def test_a_worker_starts_without_heavy_imports() -> None:
    code = """import sys, orchestrator.attempt.worker
heavy = {"numpy", "pandas", "psutil", "pydantic", "rich", "sqlalchemy", "torch", "yaml"}
print(sorted(heavy & sys.modules.keys()))"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
