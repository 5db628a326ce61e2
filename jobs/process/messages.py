"""The messages between a process and the one that started it: plain dataclasses, one line of JSON each.

    Probe         -> ProbedMachine or Failure
    MeasurePoint  -> Environment, any number of Beat, Samples, RanksStarted, Warned and Note, then Measured or Failure
    Explain       -> Explanation, also while a point is measured

Commands go to the process's stdin, events come back on a pipe; stdout and stderr stay free for the work. A rank sends
Beat, Samples, Warned, Note, RankProcess and RankFailure to the process that started it.
"""

from __future__ import annotations

import json
import numbers
import os
import reprlib
import select
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from jobs.schema import point
from jobs.schema.states import PointState

LONGEST_TEXT = 298
"""Characters of a rank's texts: a line of several ranks' pipe is written at once if it has at most PIPE_BUF bytes."""


@dataclass(frozen=True)
class Probe:
    """Describe the machine, and read the effects of environment variables."""

    device: Literal["auto", "cpu", "cuda"]
    kind: str | None = None  # the job kind, to be imported
    settings: tuple[str, ...] = ()  # names of the variables
    gpus: float | None = None  # of a point; None: one on a CUDA device


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that the ranks of a point run on."""

    cpus: float  # of each rank, as are the GPUs
    gpus: float
    accelerator_type: str | None = None  # Ray's type of the ranks' GPUs; None: any
    address: str = ""  # of the cluster's head, as its nodes know it
    runtime_env: Mapping[str, Any] = field(default_factory=dict)  # Ray's, of the supervisor, for the ranks
    env_vars: Mapping[str, str] = field(default_factory=dict)  # environment variables of the ranks
    card: str | None = None  # name of the GPU that the point is planned for; None: any


@dataclass(frozen=True)
class MeasurePoint:
    """Measure one point."""

    kind: str  # the job kind, a module of `jobs`
    config: Mapping[str, Any]
    device: point.Device
    memory_bytes: int | None = None  # most that the point may use beyond its start; None: no limit
    settings: tuple[str, ...] = ()  # environment variables whose effective values its environment shows
    checkpoints: str | None = None  # this and the key as jobs.schema.point.Surroundings
    key: str = ""
    cluster: Cluster | None = None  # where its ranks run; None: it is measured by this process


@dataclass(frozen=True)
class Explain:
    """Write files that explain what a point does, and why it stalls."""


@dataclass(frozen=True)
class Beat:
    """Progress: `done` of `total` steps of a phase; `total` is 0 where it is unknown.

    `number` counts a rank's beats except those of checkpoints. Ranks do the same, so the lowest number is the slowest.
    """

    phase: str
    done: int = 0
    total: int = 0
    rank: int = 0
    number: int = 0


@dataclass(frozen=True)
class Samples:
    """One sample of each of several live series."""

    rank: int
    step: int
    at: float  # seconds since 1970 UTC
    values: Mapping[str, float]  # by name of the series
    units: Mapping[str, str] = field(default_factory=dict)  # by the same names; a rank leaves them out


@dataclass(frozen=True)
class Warned:
    """Something went wrong that does not end the point."""

    text: str
    rank: int = 0


@dataclass(frozen=True)
class Note:
    """A text to be kept with the point while it runs, as the file `name`."""

    name: str
    text: str
    rank: int = 0


@dataclass(frozen=True)
class Environment:
    """The point's environment, sent before it is measured: it is known even if the process dies."""

    environment: Mapping[str, Any]


@dataclass(frozen=True)
class RanksStarted:
    """The point's ranks have been started. `pids` are their processes, by rank, each on its own host."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class ProbedMachine:
    """The answer to Probe."""

    machine: point.Machine
    settings: Mapping[str, str] = field(default_factory=dict)  # effective values of variables that may have an effect
    refused: Mapping[str, str] = field(default_factory=dict)  # for each other one, the reason why it has none


@dataclass(frozen=True)
class File:
    """A file of the work, to be kept by the parent."""

    name: str  # its name as an artifact, as the work chose it: anything
    path: str  # "" where there is none
    problem: str = ""  # why there is nothing to keep
    start: int = 0  # the first byte to keep
    stop: int | None = None  # the one after the last; None: up to the end


@dataclass(frozen=True)
class Measured:
    """The point was measured. `files` are those of the measurement, which itself has none here."""

    measurement: point.Measurement
    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The command failed in the process, which is still alive."""

    state: PointState  # OOM, ERROR, or CANCELLED for a point that was asked to end and can go on
    reason: str  # one line
    files: tuple[File, ...] = ()  # what explains it


@dataclass(frozen=True)
class Explanation:
    """The answer to Explain; no files if the process itself has all there is to see."""

    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class RankProcess:
    """A rank's process is starting, has formed a group with the others, or has done its work."""

    rank: int
    pid: int
    stage: Literal["starting", "joined", "done"]


@dataclass(frozen=True)
class RankFailure:
    """An exception ended a rank; `type` is its class."""

    rank: int
    type: str
    text: str

    @classmethod
    def of(cls, rank: int, err: BaseException) -> RankFailure:
        return cls(rank, type(err).__name__, str(err).strip()[:LONGEST_TEXT])


Command = Probe | MeasurePoint | Explain
RankEvent = Beat | Samples | Warned | Note | RankProcess | RankFailure
Event = RankEvent | Environment | RanksStarted | ProbedMachine | Measured | Failure | Explanation
Message = Command | Event

_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as a line, with its line feed; halves of characters become question marks."""
    text = json.dumps([type(message).__name__, asdict(message)], default=_plain, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError."""
    try:
        name, fields = json.loads(line)
        return _reader(name).validate_python(fields)
    except ValidationError as err:
        first = err.errors()[0]
        raise ValueError(f"{err.title}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError) as err:
        raise ValueError(f"{reprlib.repr(line)}: {type(err).__name__}: {err}") from None


@cache
def _reader(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_TYPES[name])


def _plain(value: Any) -> int | float | str:
    """A value that JSON does not know (a job's NumPy number, a path), as one that it does."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


class Outbox:
    """The writing end of a pipe. Thread-safe; several processes may share a named pipe if their lines are short."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        data = memoryview(encode(message))
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


class Inbox:
    """The reading end of a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.closed = False  # whether nobody can write to it any more

    def receive(self, timeout: float) -> list[Message]:
        """Messages that arrived; waits up to `timeout` seconds for the first. A line that is none is a Failure."""
        if self.closed or not select.select([self._fd], [], [], timeout)[0]:
            return []
        chunk = os.read(self._fd, 1 << 20)
        self.closed = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        messages: list[Message] = []
        for line in lines:
            try:
                messages.append(decode(line))
            except ValueError as err:
                messages.append(Failure(PointState.ERROR, f"the process sent an unreadable message: {err}"))
        return messages

    def close(self) -> None:
        os.close(self._fd)
