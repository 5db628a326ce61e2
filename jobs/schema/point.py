"""Points, their measurements, and the machine that they run on.

All of it survives JSON: points are sent to other hosts, results are stored in journals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from jobs.schema.axes import Axes
from jobs.schema.launcher import Launcher
from jobs.schema.quantities import Quantity
from jobs.schema.states import PointState

Device = Literal["cpu", "cuda"]

WAITING = "waiting for "
"""Begin of the phases in which a point waits for room to be measured in: its deadlines count from their end."""

STARTING = "start"
"""Phase in which processes of a point start again: silence in it is judged as that before the first progress."""

FAILURE_FILES = "failure-files"
"""Folder in the point's temporary folder; its files are kept of a point that hangs or takes too long."""

TRITON_PROBLEM = "triton-problem"
"""In a machine's fingerprint: why the kernels do not load with its Triton."""

SHORT = 1600
"""Characters of a text that is kept while its point runs: a rank may send it in one write to a pipe."""


@dataclass(frozen=True)
class Machine:
    """The device that a run's points will use, probed on the host where they will run.

    Attributes:
        device: "cpu" or "cuda".
        name: the GPU's name, or the processor's.
        memory_bytes: memory that one point may use: the card's, or the available memory of the host.
        fingerprint: versions that results depend on (Python, torch, triton, CUDA, driver); part of a point's key.
    """

    device: Device
    name: str
    memory_bytes: int
    fingerprint: Mapping[str, str] = field(default_factory=dict)


class Case(BaseModel):
    """Everything that determines one measurement. A kind's module has its own subclass, named `Case`.

    A spec's `points` builds it, and `measure` gets an equal one. Its JSON is stored, and hashed for the point's key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Point:
    """One measurement to take.

    Attributes:
        kind: the job kind that measures it.
        label: display name, unique within the run.
        case: what to measure; its JSON form (a mapping) in a point that was sent to another process.
        axes: coordinates for comparison.
        estimate_bytes: predicted peak memory; None without a prediction.
        skip_reason: reason not to run it, e.g. that it will not fit; None to run it.
        env: environment variables that are set for its process; the spec's, not the kind's.
        python: path of the interpreter that measures it; None: the orchestrator's own.
        answers: states in which it answers a search and fails no run, e.g. oom of a length that does not fit.
        conclusion: what earlier points add up to; such a point is not measured.
    """

    kind: str
    label: str
    case: Case | Mapping[str, Any]
    axes: Axes = field(default_factory=Axes)
    estimate_bytes: int | None = None
    skip_reason: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    answers: frozenset[PointState] = frozenset()
    conclusion: Conclusion | None = None

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
    """One measured quantity of a point.

    Attributes:
        name, unit: as jobs.schema.quantities or the kind declares them.
        value: the median of `samples`, or a single value.
        samples: every sample kept, in the order taken.
        p10, p90: percentiles of the samples.
        ci_low, ci_high: 95 % interval, by bootstrap of the median unless `method` says otherwise.
        method: description of the measurement.
    """

    name: str
    unit: str
    value: float
    samples: tuple[float, ...] = ()
    p10: float | None = None
    p90: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    method: str = ""

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
class Reading:
    """Present values of quantities of one rank, read while a point runs.

    Attributes:
        number: the reading's number, higher in each later one.
        at: its time, seconds since 1970 UTC.
    """

    rank: int
    number: int
    at: float
    values: Mapping[Quantity, float]


@dataclass(frozen=True)
class Measurement:
    """Results of a successful point.

    Attributes:
        metrics: the numbers.
        route: kernels that really ran, by branch, e.g. {"cmp": "chunked", "slc": "chunked", "win": "sdpa-flash"}.
        environment: versions, driver, GPU name and UUID, clocks, host, the effective environment variables.
        files: files to keep, by plain file name (letters, digits, "._-"): a text, or the Path of a file of any size
            that was written, best in a temporary folder, which is removed with the point's process.
    """

    metrics: tuple[Metric, ...]
    route: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str | Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """Places outside of its process that a point may use; they are not part of its configuration or its key.

    Attributes:
        checkpoints: URL (fsspec) of the folder in which the point keeps its checkpoints: the same in all its attempts
            and resumes, reachable from every node, and not made yet; None: it can keep none.
        key: the point's key (Point.key): a checkpoint of another key is of other code or another environment.
        launcher: starts the ranks of a point that has several; None: the point starts them on its own host.
    """

    checkpoints: str | None = None
    key: str = ""
    launcher: Launcher | None = None


NOWHERE = Surroundings()
"""Surroundings of a point that can keep nothing."""


class Interrupted(Exception):  # noqa: N818  (an event)
    """Raised by a job that was asked to end and can go on later: the point is cancelled, not failed."""


class Beat(Protocol):
    """Callback that reports progress; silence longer than the heartbeat deadline counts as a hang."""

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None: ...


class Reporter:
    """Beat that also takes samples of live series. Every point's worker passes a subclass; this one drops them.

    Attributes:
        surroundings: places that the point may use.
    """

    surroundings: Surroundings = NOWHERE

    def __init__(self, beat: Beat) -> None:
        self._beat = beat

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self._beat(phase, done, total)

    def sample(self, step: int, values: Mapping[str, float], rank: int = 0) -> None:
        """Report the present values of series, by the name of a declared Quantity and in its unit.

        Returns at once; samples are thinned to one a second a series or fewer. Values that are not finite are left
        out.

        Args:
            step: the step that the values belong to, from 0; higher in each later sample of a series.
            rank: the process of a training on several devices that the values are of.

        Raises:
            ValueError: a name is not among the kind's QUANTITIES.
        """

    def warn(self, text: str) -> None:
        """Tell the user at once of something that went wrong and does not end the point, in one line."""

    def keep(self, name: str, text: str) -> None:
        """Keep a short text with the point at once, as one of its files, for those who look at it while it runs.

        Args:
            name: of the file, as in Measurement.files; a further one of an attempt is numbered: NAME-2.json.
            text: of at most SHORT characters, ASCII.
        """

    def ranks(self, pids: Sequence[int]) -> None:
        """Tell that the point's ranks have been started: their processes by rank, to be watched each by itself."""


def reporter(beat: Beat) -> Reporter:
    """The Reporter that a job was passed; for a plain function one that drops samples and has no surroundings."""
    return beat if hasattr(beat, "sample") else Reporter(beat)  # pyright: ignore[reportReturnType] - by its method
