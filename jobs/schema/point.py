"""Points, their measurements, the machine that they run on, and what a job is given there: its reporter, its ranks.

All of it survives JSON: points are sent to other hosts, results are stored in journals.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from jobs.schema.axes import Axes
from jobs.schema.quantities import Quantity
from jobs.schema.states import PointState

Device = Literal["cpu", "cuda"]
T = TypeVar("T")

WAITING = "waiting for "  # begins the phases in which a point waits for room: its deadlines count from their end
TIMING, TIMED = "time", "timed"  # phases: samples of time are taken; calls were timed, in so many ms by their clock
REPEATING, REPEATED = "repeat", "repeated"  # phases: calls are made that should take three seconds by their samples
STARTING = "start"  # phase in which processes of a point start: silence in it is judged as that before a first beat
FAILURE_FILES = "failure-files"  # in the temporary folder; its files are kept of a point that hangs or is too slow
TRITON_PROBLEM = "triton-problem"  # in a machine's fingerprint: why the kernels do not load with its Triton
SHORT = 1600  # characters of a text that is kept while its point runs: a rank sends it in one write to a pipe


@dataclass(frozen=True)
class Machine:
    """The device that a run's points will use, probed on the host where they will run."""

    device: Device
    name: str  # the GPU's, or the processor's
    memory_bytes: int  # that one point may use: the card's, or the available memory of the host
    # Versions that results depend on (Python, torch, triton, CUDA, driver); part of a point's key.
    fingerprint: Mapping[str, str] = field(default_factory=dict)


class Case(BaseModel):
    """Everything that determines one measurement. A kind's module has its own subclass, named `Case`.

    A spec's `points` builds it, and `measure` gets an equal one. Its JSON is stored, and hashed for the point's key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Point:
    """One measurement to take."""

    kind: str  # the job kind that measures it
    label: str  # display name, unique within the run
    case: Case | Mapping[str, Any]  # what to measure; in its JSON form in a point that was sent to another process
    axes: Axes = field(default_factory=Axes)
    estimate_bytes: int | None = None  # predicted peak memory; None without a prediction
    skip_reason: str | None = None  # why not to run it, e.g. that it will not fit; None to run it
    env: Mapping[str, str] = field(default_factory=dict)  # variables that are set for its process, by the spec
    python: str | None = None  # path of the interpreter that measures it; None: the orchestrator's own
    answers: frozenset[PointState] = frozenset()  # states that answer a search and fail no run: oom of a length
    conclusion: Conclusion | None = None  # what earlier points add up to; such a point is not measured

    @property
    def config(self) -> Mapping[str, Any]:
        """The case in its JSON form."""
        return self.case.model_dump(mode="json") if isinstance(self.case, Case) else self.case

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the JSON form: a process that supervises points on another host imports no kind, and no PyTorch."""
        return {**self.__dict__, "case": self.config}

    def key(self, code_hash: str, machine: Machine) -> str:
        """Key for resuming, 16 hex digits; equal for the same configuration, code and environment."""
        where = [machine.device, machine.name, dict(machine.fingerprint), dict(self.env), self.python]
        material = [self.kind, self.config, code_hash, *where]
        if self.conclusion is not None:  # it follows from others, not from its case
            material.append([[metric.name, metric.value] for metric in self.conclusion.metrics])
        return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EndedPoint:
    """A point that has ended, as `JobSpec.next_points` sees it; only an ok one has metrics, by name."""

    point: Point
    state: PointState
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One measured quantity of a point."""

    name: str  # as jobs.schema.quantities or the kind declares it
    unit: str
    value: float  # the median of `samples`, or a single value
    samples: tuple[float, ...] = ()  # all, in the order taken
    p10: float | None = None  # percentiles of the samples
    p90: float | None = None
    ci_low: float | None = None  # 95 % interval, by bootstrap of the median unless `method` says otherwise
    ci_high: float | None = None
    method: str = ""  # description of the measurement

    @classmethod
    def of(cls, quantity: Quantity, value: float, samples: tuple[float, ...] = (), method: str = "") -> Metric:
        """Metric of a declared quantity; `value` and `samples` are in its unit."""
        return cls(quantity.name, quantity.unit, value, samples, method=method)


@dataclass(frozen=True)
class Conclusion:
    """Result of a point that follows from others; `warning` is shown to the user."""

    metrics: tuple[Metric, ...]
    warning: str | None = None


@dataclass(frozen=True)
class Samples:
    """One sample of each of several live series of a rank."""

    rank: int
    step: int  # higher in each later one
    at: float  # seconds since 1970 UTC
    values: Mapping[str, float]  # by name of the series
    units: Mapping[str, str] = field(default_factory=dict)  # by the same names; a rank leaves them out


@dataclass(frozen=True)
class Measurement:
    """Results of a successful point."""

    metrics: tuple[Metric, ...]
    route: Mapping[str, str] = field(default_factory=dict)  # kernels that really ran, by branch: {"cmp": "chunked"}
    # Versions, driver, GPU name and UUID, clocks, host, the effective environment variables.
    environment: Mapping[str, Any] = field(default_factory=dict)
    # Files to keep, by plain name (letters, digits, "._-"): a text, or the Path of a file of any size, best in a
    # temporary folder, which is removed with the point's process.
    files: Mapping[str, str | Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Rank:
    """One of several ranks, as its own process gets it once all have formed torch.distributed's process group."""

    number: int  # from 0
    device: str  # PyTorch's name of its device
    post: Callable[[Any], None]  # sends a message, plain data, to the process that started the ranks
    stop: threading.Event  # set when the ranks are to end
    folder: Path  # for files that explain a stall; made by who writes one


@dataclass(eq=False)
class RanksEnded(Exception):  # noqa: N818  (an event)
    """Not every rank returned a result; all have ended."""

    died: Mapping[int, str]  # ends of ranks whose process died ("was killed by SIGKILL"), the first one first
    tails: Mapping[int, str]  # last lines that a rank wrote to stderr
    out_of_memory: Collection[int] = ()  # those among `died` that were killed because memory ran out
    cards: Mapping[int, str] = field(default_factory=dict)  # of the ranks on GPUs: "GPU 1"


class Launcher(Protocol):
    """Starts the ranks of a point, on one host or several."""

    name: ClassVar[str]  # for the point's environment

    def run(
        self,
        ranks: int,
        device: str,
        main: Callable[[Rank], T],
        note: Callable[[Any], None],
        tell: Callable[[str], None],
        stop: threading.Event,
    ) -> list[T]:
        """Run `main`, which can be pickled, as each rank, and return the results by rank.

        Args:
            note: called with each message of a rank.
            tell: called about once a second, with the reason, while the ranks wait to be started.
            stop: once set, the ranks are asked to end.

        Raises:
            RanksEnded: a rank raised an exception or died, or the ranks were to end before they had begun.
        """
        ...


@dataclass(frozen=True)
class Surroundings:
    """Places outside of its process that a point may use; they are not part of its configuration or its key."""

    # URL (fsspec) of the folder for the point's checkpoints: the same in all its attempts and resumes, reachable from
    # every node, and not made yet; None: it can keep none.
    checkpoints: str | None = None
    key: str = ""  # Point.key: a checkpoint of another key is of other code or another environment
    launcher: Launcher | None = None  # starts the ranks of a point that has several; None: the point, on its own host


NOWHERE = Surroundings()  # of a point that can keep nothing


class Interrupted(Exception):  # noqa: N818  (an event)
    """Raised by a job that was asked to end and can go on later: the point is cancelled, not failed."""


class Beat(Protocol):
    """Callback that reports progress; silence longer than the heartbeat deadline counts as a hang."""

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None: ...


@dataclass(eq=False)
class Reporter:
    """Beat that also takes samples of live series. Every point's worker passes a subclass; this one drops them."""

    beat: Beat
    surroundings: Surroundings = NOWHERE

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.beat(phase, done, total)

    def sample(self, step: int, values: Mapping[str, float], rank: int = 0) -> None:
        """Report the present values of series, by the name of a declared Quantity and in its unit.

        Returns at once; samples are thinned to one a second a series or fewer, values that are not finite left out. The
        step is higher in each later sample of a series. Raises ValueError for a name not among the kind's QUANTITIES.
        """

    def warn(self, text: str) -> None:
        """Tell the user at once of something that went wrong and does not end the point, in one line."""

    def keep(self, name: str, text: str) -> None:
        """Keep a text of at most SHORT ASCII characters at once, as one of the point's files, while it runs.

        A further file of the name in an attempt is numbered: NAME-2.json.
        """

    def ranks(self, pids: Sequence[int]) -> None:
        """Tell that the point's ranks have been started: their processes by rank, to be watched each by itself."""


def reporter(beat: Beat) -> Reporter:
    """The Reporter that a job was passed; for a plain function one that drops samples and has no surroundings."""
    return beat if hasattr(beat, "sample") else Reporter(beat)  # pyright: ignore[reportReturnType] - by its method
