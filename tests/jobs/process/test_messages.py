"""Messages survive their lines, bad ones are failures; progress and samples are checked, thinned, never in the way."""

import math
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jobs.process import messages
from jobs.process import reporter as reporting
from jobs.process.messages import Beat, Failure, Inbox, Message, decode, encode
from jobs.process.reporter import BEAT_INTERVAL_S, ProcessReporter
from jobs.schema import point
from jobs.schema.files import File
from jobs.schema.point import Samples
from jobs.schema.states import PointState

ROOT = Path(__file__).resolve().parents[3]
METRICS = (point.Metric("time", "ms", 2.5, (2.0, 3.0), p10=2.1, method="events"), point.Metric("loss", "1", -1.0))
EXAMPLES: list[Message] = [
    messages.Explain(),
    messages.MeasurePoint("train", {}, "cuda", cluster=messages.Cluster(0.5, 1, "H100", "10.0.0.1:6379", {"a": ["b"]})),
    messages.Beat("timing – ü\n", 1, 2),
    point.Samples(1, 1 << 40, 1795435243.343, {"loss": 2.5}, {"loss": "nat/byte"}),
    messages.RanksStarted((41, 43)),
    messages.ProbedMachine(point.Machine("cuda", "H100", 80 << 30, {"torch": "2.13"})),
    messages.Measured(
        point.Measurement(METRICS, {"cmp": "chunked"}, {"host": "a"}), (File("stages.txt", "/tmp/file-1"),)
    ),
    Failure(PointState.OOM, "CUDA out of memory", (File("a.txt", "", "the disk is full"),)),
    messages.RankProcess(1, 43, "joined"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_line(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_a_jobs_own_types_become_numbers_and_text() -> None:
    value: Any = np.float32(2.5)  # a job that forgot to convert
    measurement = point.Measurement((point.Metric("time", "ms", value),), environment={"n": np.int64(3), "at": ROOT})
    message = decode(encode(messages.Measured(measurement)))
    assert isinstance(message, messages.Measured)
    assert message.measurement.metrics[0].value == 2.5
    assert message.measurement.environment == {"n": 3, "at": str(ROOT)}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"nonsense", "b'nonsense': JSONDecodeError"),
        (b'["Beet", {}]', "KeyError: 'Beet'"),
        (b'["Beat", {"phase": null}]', "Beat.phase: Input should be a valid string"),
        (b'["Failure", {"state": "oom", "reason": "", "files": [1]}]', "Failure.files.0: "),
    ],
)
def test_a_malformed_line_is_a_failure_that_says_which(tmp_path: Path, line: bytes, reason: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(fd, encode(EXAMPLES[0]) + line + b"\n")
    good, failure = Inbox(fd).receive(1)
    os.close(fd)
    assert good == EXAMPLES[0]
    assert isinstance(failure, Failure)
    assert failure.reason.startswith("the process sent an unreadable message: ")
    assert reason in failure.reason


UNITS = {"loss": "nat/byte", "speed": "tok/s"}


class Sent(list[Any]):
    def reporter(self, **options: Any) -> ProcessReporter:
        return ProcessReporter(self.append, **{"units": UNITS, **options})

    def of(self, name: str, rank: int = 0) -> list[tuple[int, float]]:
        samples = [each for each in self if isinstance(each, Samples)]
        return [(each.step, each.values[name]) for each in samples if each.rank == rank and name in each.values]


def test_beats_of_a_phase_are_thinned_but_a_new_phase_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = [7.0], Sent()
    report = sent.reporter()
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for done in range(100):
        report("timing", done, 100)
    report("memory")
    clock[0] += BEAT_INTERVAL_S + 0.001
    report("memory", 1, 2)
    assert [(beat.phase, beat.done) for beat in sent] == [("timing", 0), ("memory", 0), ("memory", 1)]
    assert sent[-1] == Beat("memory", 1, 2, number=102), "counts all"


def test_samples_of_a_second_are_thinned_to_one_and_the_last_is_sent() -> None:
    sent = Sent()
    report = sent.reporter(interval=lambda _: 0.2)
    begun = time.monotonic()
    for step in range(50):
        report.sample(step, {"loss": float(step), "speed": 2.0 * step})
        report.sample(step, {"speed": 7.0}, rank=1)
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    report.close()
    losses = sent.of("loss")
    assert losses[-1] == (49, 49.0)
    assert 3 <= len(losses) <= seconds / 0.2 + 2
    assert [step for step, _ in losses] == sorted({step for step, _ in losses})
    assert [value for _, value in sent.of("speed")] == [2.0 * step for step, _ in sent.of("speed")]
    assert sent.of("speed", rank=1)[-1] == (49, 7.0)
    assert {unit for each in sent for unit in each.units.items()} == set(UNITS.items())


def test_a_full_pipe_does_not_hold_up_a_step() -> None:
    stuck, sent = threading.Event(), []
    report = ProcessReporter(lambda _: sent.append(stuck.wait(60)), units=UNITS, interval=lambda _: 0.01)
    for step in range(200):
        report.sample(step, {"loss": 1.0, "speed": 2.0})
        time.sleep(0.001)
    assert sent == [], "the sender is stuck for as long as the loop runs"
    stuck.set()
    report.close()
    assert sent


def test_a_series_must_be_declared_and_in_order_and_finite() -> None:
    sent = Sent()
    report = sent.reporter()
    with pytest.raises(ValueError, match=r"series lost: is not declared by this name; mend the kind's QUANTITIES"):
        report.sample(0, {"loss": 1.0, "lost": 1.0})
    for step, rank in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="0 or more"):
            report.sample(step, {"loss": 1.0}, rank)
    report.sample(1, {"loss": math.nan, "speed": 3.0})
    report.close()
    assert (sent.of("loss"), sent.of("speed")) == ([], [(1, 3.0)])
