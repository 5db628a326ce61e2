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
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from jobs.schema import point
from jobs.schema.files import File
from jobs.schema.states import PointState

LONGEST_TEXT = 298  # characters of a rank's texts: a pipe takes lines of several ranks whole up to PIPE_BUF bytes


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
class Warned:
    text: str  # what went wrong, and does not end the point
    rank: int = 0


@dataclass(frozen=True)
class Note:
    name: str  # of a file that is kept with the point while it runs
    text: str
    rank: int = 0


@dataclass(frozen=True)
class Environment:
    environment: Mapping[str, Any]  # the point's, sent before it is measured: known even if the process dies


@dataclass(frozen=True)
class RanksStarted:
    pids: tuple[int, ...]  # the point's ranks, each on its own host


@dataclass(frozen=True)
class ProbedMachine:
    machine: point.Machine
    settings: Mapping[str, str] = field(default_factory=dict)  # effective values of variables that may have an effect
    refused: Mapping[str, str] = field(default_factory=dict)  # for each other one, the reason why it has none


@dataclass(frozen=True)
class Measured:
    measurement: point.Measurement  # without its files
    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The command failed in the process, which is still alive."""

    state: PointState  # OOM, ERROR, or CANCELLED for a point that was asked to end and can go on
    reason: str  # one line
    files: tuple[File, ...] = ()  # what explains it


@dataclass(frozen=True)
class Explanation:
    files: tuple[File, ...] = ()  # none if the process itself has all there is to see


@dataclass(frozen=True)
class RankProcess:
    rank: int
    pid: int
    stage: Literal["starting", "joined"]  # joined: has formed a group with the others


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
RankEvent = Beat | point.Samples | Warned | Note | RankProcess | RankFailure
Event = RankEvent | Environment | RanksStarted | ProbedMachine | Measured | Failure | Explanation
Message = Command | Event

_TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in get_args(Message)}
_adapter: Callable[[type[Message]], TypeAdapter[Any]] = cache(TypeAdapter)  # made when first needed: it takes long


def encode(message: Message) -> bytes:
    """The message as a line, with its line feed; lone surrogates become question marks."""

    def plain(value: Any) -> int | float | str:  # of what JSON does not know: a job's NumPy number, a path
        if isinstance(value, numbers.Integral):
            return int(value)
        return float(value) if isinstance(value, numbers.Real) else str(value)

    text = json.dumps([type(message).__name__, asdict(message)], default=plain, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line. Raises ValueError."""
    try:
        name, fields = json.loads(line)
        return _adapter(_TYPES[name]).validate_python(fields)
    except ValidationError as err:
        first = err.errors()[0]
        raise ValueError(f"{err.title}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError) as err:
        raise ValueError(f"{reprlib.repr(line)}: {type(err).__name__}: {err}") from None


@dataclass
class Outbox:
    """The writing end of a pipe. Thread-safe; several processes may share a named pipe if their lines are short."""

    fd: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Message) -> None:
        data = memoryview(encode(message))
        with self._lock:
            while data:
                data = data[os.write(self.fd, data) :]


@dataclass
class Inbox:
    """The reading end of a pipe."""

    fd: int
    closed: bool = False  # whether nobody can write to it any more
    _rest: bytes = b""  # of a line that has arrived in part

    def receive(self, timeout: float) -> list[Message]:
        """Messages that arrived; waits up to `timeout` seconds for the first. A line that is none is a Failure."""
        if self.closed:  # do not spin until the process is gone
            time.sleep(min(timeout, 0.05))
        if self.closed or not select.select([self.fd], [], [], timeout)[0]:
            return []
        chunk = os.read(self.fd, 1 << 20)
        self.closed = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        messages: list[Message] = []
        for line in lines:
            try:
                messages.append(decode(line))
            except ValueError as err:
                messages.append(Failure(PointState.ERROR, f"the process sent an unreadable message: {err}"))
        return messages
