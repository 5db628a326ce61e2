"""The typed messages between a supervisor and its worker, one JSON object a line.

Commands go to the worker's stdin, events come back on a pipe; stdout and stderr stay free for the measurement.

    (start)  -> Ready
    Probe    -> Machine or Failure
    Run      -> Environment, any number of Beats, Samples, Ranks, Warned and Noted, then Result or Failure
    Explain  -> Explained, also while a point is measured
    Exit     -> the worker ends

Both sides may run under different interpreters, so Ready names the worker's version of the protocol. Raise VERSION with
every change to a message. Imported by the worker, once a point: standard library and plain data only.
"""

from __future__ import annotations

import json
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jobs.schema import point
from jobs.schema.states import PointState

VERSION = 7


class ProtocolError(ValueError):
    """A line that is not a message. The text names the message, the field and the value."""


@dataclass(frozen=True)
class Probe:
    """Describe the machine, and read the effects of environment variables.

    Attributes:
        device: "auto", "cpu" or "cuda".
        kind: the job kind, to be imported; None: none.
        settings: names of the variables.
        gpus: GPUs of a point; None: one on a CUDA device.
    """

    device: str
    kind: str | None = None
    settings: tuple[str, ...] = ()
    gpus: float | None = None


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that the ranks of a point run on.

    Attributes:
        cpus, gpus: of each rank.
        accelerator_type: Ray's type of the ranks' GPUs; None: any.
        address: of the cluster's head, as its nodes know it.
        runtime_env: Ray's runtime environment of the supervisor, for the ranks.
        env_vars: environment variables of the ranks.
        card: name of the GPU that the point is planned for; None: any.
    """

    cpus: float
    gpus: float
    accelerator_type: str | None = None
    address: str = ""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    card: str | None = None


@dataclass(frozen=True)
class Run:
    """Measure one point.

    Attributes:
        kind: the job kind, a module of `jobs`.
        config: the point's configuration.
        memory_bytes: most that the point may use beyond its start; None: no limit.
        settings: names of environment variables whose effective values its environment shows.
        folder: an existing folder for the texts that it leaves; None: the folder of temporary files.
        surroundings: places that it may use.
        cluster: where its ranks run; None: it is measured by this worker, and on its host.
    """

    kind: str
    config: Mapping[str, Any]
    device: point.Device
    memory_bytes: int | None
    settings: tuple[str, ...] = ()
    folder: str | None = None
    surroundings: point.Surroundings = point.NOWHERE
    cluster: Cluster | None = None


@dataclass(frozen=True)
class Explain:
    """Write files that explain what a point does, and why it stalls."""


@dataclass(frozen=True)
class Exit:
    """Leave."""


@dataclass(frozen=True)
class Ready:
    """The first event: the worker takes commands.

    Every version of the protocol keeps these two fields; fields that a later one adds are ignored.
    """

    pid: int
    version: int = VERSION


@dataclass(frozen=True)
class Beat:
    """The measurement got further: `done` of `total` steps of a phase; `total` is 0 where it is unknown."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Environment:
    """The point's environment, sent before it is measured: it is known even if the worker dies."""

    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """The answer to Probe.

    Attributes:
        settings: effective value of each variable that was asked for and may have an effect.
        refused: for each other one, the reason why it has none.
    """

    machine: point.Machine
    settings: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class File:
    """A file that the point leaves.

    Attributes:
        name: its name as an artifact, as the measurement gave it: anything.
        path: where it lies; "" where there is none.
        problem: why it could not be written; "" otherwise.
    """

    name: str
    path: str
    problem: str = ""


@dataclass(frozen=True)
class Result:
    """The point was measured. `files` are those of the measurement, which has none itself here."""

    measurement: point.Measurement
    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The command failed in the worker, which is still alive.

    Attributes:
        state: OOM, ERROR, or CANCELLED for a point that was asked to end and can go on.
        reason: one line.
        files: what explains it.
    """

    state: PointState
    reason: str
    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class Explained:
    """The answer to Explain; no files if the worker's own process has all there is to see."""

    files: tuple[File, ...] = ()


@dataclass(frozen=True)
class Samples:
    """One sample of each of several series of a rank.

    Attributes:
        step: the step that the values belong to.
        at: time of the sample, seconds since 1970 UTC.
        values: value by name of the series.
        units: their units, by the same names.
    """

    rank: int
    step: int
    at: float
    values: Mapping[str, float]
    units: Mapping[str, str]


@dataclass(frozen=True)
class Ranks:
    """The point's ranks have been started. `pids` are their processes, by rank, each on its own host."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class Warned:
    """Something went wrong that does not end the point."""

    text: str


@dataclass(frozen=True)
class Noted:
    """A text to be kept with the point while it runs, as the file `name`."""

    name: str
    text: str


Command = Probe | Run | Explain | Exit
Event = Ready | Beat | Environment | Machine | Result | Failure | Explained | Samples | Ranks | Warned | Noted


def encode(message: Command | Event) -> bytes:
    """The message as a line, with its line feed."""
    data = {"type": _tag(type(message)), **asdict(message)}
    return json.dumps(data, default=_plain).encode() + b"\n"


def decode_command(line: bytes) -> Command:
    """The command in a line. Raises ProtocolError."""
    return _decode(line, _COMMANDS)


def decode_event(line: bytes) -> Event:
    """The event in a line. Raises ProtocolError."""
    return _decode(line, _EVENTS)


def _tag(message: type) -> str:
    return message.__name__.lower()


_COMMANDS: dict[str, type[Command]] = {_tag(message): message for message in get_args(Command)}
_EVENTS: dict[str, type[Event]] = {_tag(message): message for message in get_args(Event)}


def _plain(value: Any) -> int | float | str:
    """A value that JSON does not know (a job's NumPy number, a path), as one that it does."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


def _decode(line: bytes, known: Mapping[str, type]) -> Any:
    try:
        data = json.loads(line)
    except ValueError as err:
        raise ProtocolError(f"{reprlib.repr(line)} is not JSON ({err})") from None
    tag = data.get("type") if isinstance(data, dict) else None
    message = known.get(tag) if isinstance(tag, str) else None
    if message is None:
        raise ProtocolError(f"{reprlib.repr(line)}: its type is not one of {', '.join(known)}")
    return _read_fields(message, {name: value for name, value in data.items() if name != "type"}, _tag(message))


def _read_fields(cls: type, data: Mapping[str, Any], place: str) -> Any:
    names = [field.name for field in fields(cls)]
    if missing := [name for name in names if name not in data]:
        raise ProtocolError(f"{place}: lacks {', '.join(missing)}")
    if cls is not Ready and (unknown := [name for name in data if name not in names]):
        raise ProtocolError(f"{place}: has unknown fields: {', '.join(unknown)}")
    hints = get_type_hints(cls)
    return cls(**{name: _read(hints[name], data[name], f"{place}.{name}") for name in names})


def _read(kind: Any, value: Any, place: str) -> Any:
    """A field's value from JSON. Raises ProtocolError where it is not of type `kind`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any or (origin is Literal and value in args):
        return value
    if origin is UnionType:  # of a type and None
        return None if value is None else _read(args[0], value, place)
    if origin is Mapping and isinstance(value, dict):
        return {key: _read(args[1], item, f"{place}[{key!r}]") for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_read(args[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _read_fields(kind, value, place)
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    if isinstance(kind, type) and issubclass(kind, Enum) and value in list(kind):
        return kind(value)
    raise ProtocolError(f"{place}: {reprlib.repr(value)} is not of type {getattr(kind, '__name__', kind)}")
