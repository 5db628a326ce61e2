"""Messages survive their lines; a line that is none is a failure; named pipes of several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.process import messages
from jobs.process.messages import Failure, Inbox, Message, decode, encode
from jobs.schema import point
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
        point.Measurement(METRICS, {"cmp": "chunked"}, {"host": "a"}), (messages.File("stages.txt", "/tmp/file-1"),)
    ),
    Failure(PointState.OOM, "CUDA out of memory", (messages.File("a.txt", "", "the disk is full"),)),
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
