"""The fields that specs of every kind have (jobs.specs.load reads them, jobs.specs.kinds finds the kinds)."""

import re
import shlex
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from jobs.schema.axes import AXES
from jobs.schema.point import EndedPoint, Machine, Point
from jobs.specs.validation import each_once

_SIZES = {axis.name: axis.size for axis in AXES}
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SET_BY_US = {
    "CUDA_VISIBLE_DEVICES": "ask for GPUs with resources.num_gpus",
    "CUDA_DEVICE_ORDER": "remove it",
    "OMP_NUM_THREADS": "set resources.num_cpus",
    "MKL_NUM_THREADS": "set resources.num_cpus",
    "PYTHONPATH": "give another interpreter in python",
    "TMPDIR": "remove it",
}
_CARD_MEMORY = re.compile(r"-(\d+)G$")  # of an accelerator type
_READABLE = 60  # characters that a label shows of an environment or an interpreter


class SpecError(ValueError):
    """A spec that cannot be used. One line a mistake: field, value, fix."""


class Strict(BaseModel):
    """Base of spec sections: frozen, unknown keys are errors, and numbers may not be text, true or infinity."""

    # Defaults are validated, too: a float's default of 20 would else come back from a stored spec as 20.0, and the
    # point under another key.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class Resources(Strict):
    """Resources that one point is scheduled with."""

    num_gpus: float | None = Field(
        default=None, ge=0, le=2**16, description="GPUs a point needs; None: 1 on a CUDA device, else 0"
    )
    num_cpus: float = Field(default=1, ge=1e-4, le=2**16, description="CPU cores a point needs")
    accelerator_type: str | None = Field(
        default=None, description="Ray's accelerator type, e.g. A100, H100, H200; with its memory: A100-80G, A100-40G"
    )
    workers: int | None = Field(
        default=None, ge=1, le=2**16, description="points at a time; None: as many as the cluster has room for"
    )

    @field_validator("num_gpus")
    @classmethod
    def _whole_gpus(cls, gpus: float | None) -> float | None:
        """Refuse what Ray cannot give: a point gets whole GPUs, or a fraction of one."""
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError("more than one GPU must be a whole number; use 1, or a fraction below 1 to share one")
        if gpus is not None and 0 < gpus < 1e-4:
            raise ValueError("is a smaller share of a GPU than Ray can give; use at least 0.0001, or 0 for none")
        return gpus

    def misfit(self, machine: Machine) -> str | None:
        """Why the machine's card is not of the accelerator type that was asked for; None if it may be."""
        plain, asked = card_of(self.accelerator_type or "")
        found = machine.memory_bytes / 2**30
        if asked is None or abs(found - asked) < 0.2 * asked:
            return None
        return (
            f"resources.accelerator_type: {self.accelerator_type!r}: Ray chose {machine.name} with {found:.0f} GiB, "
            f"which it calls {plain}, too; start nodes that have the other card with "
            f"--resources='{{\"accelerator_type:{self.accelerator_type}\": 1}}'"
        )


def card_of(accelerator_type: str) -> tuple[str, int | None]:
    """Type that Ray gives nodes with such cards, and the cards' memory [GiB] if the name has it: A100-80G."""
    found = _CARD_MEMORY.search(accelerator_type)
    return _CARD_MEMORY.sub("", accelerator_type), int(found[1]) if found else None


class Deadlines(Strict):
    """Time limits. On expiry the point's stacks are dumped and its process group killed."""

    startup_s: float = Field(
        default=300,
        gt=0,
        le=10**6,
        description="until the first progress, also of ranks that start again: imports, compilation",
    )
    heartbeat_s: float = Field(
        default=120, gt=0, le=10**6, description="between two signs of progress; longer silence is a hang"
    )
    point_s: float = Field(
        default=900, gt=0, le=10**6, description="for the whole point; beyond it the point is a timeout"
    )


def env_text(env: Mapping[str, str]) -> str | None:
    """The axis `env`: "NAME=value NAME=value", sorted by name; None for no variables.

    Values are quoted as a shell needs them, so that different environments never have the same text.
    """
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())) or None


def _check_name(name: str) -> str:
    if fix := _SET_BY_US.get(name):
        raise ValueError(f"is set for each point by the orchestrator; {fix}")
    if not _NAME.fullmatch(name):
        raise ValueError("is no name of a variable; use letters, digits and '_', a letter first")
    return name


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed; remove them")
    return text


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError("is not an absolute path; give that of an interpreter, e.g. /opt/other/bin/python")
    return _printable(path)


def _listed(written: Any) -> BeforeValidator:
    """A list of what may be written as one; `written` is the type of both."""
    return BeforeValidator(lambda value: value if isinstance(value, list) else [value], json_schema_input_type=written)


def _distinct(envs: list[dict[str, str]]) -> list[dict[str, str]]:
    texts = [env_text(env) or "{}" for env in envs]
    for text in texts:
        if len(text) > _SIZES["env"]:
            raise ValueError(f"{text[:40]}... has {len(text)} characters; use at most {_SIZES['env']} in all")
    each_once(texts)
    return envs


_Variables = dict[Annotated[str, AfterValidator(_check_name)], Annotated[str, AfterValidator(_printable)]]
_Interpreter = Annotated[str, Field(max_length=_SIZES["python"]), AfterValidator(_absolute)]


class JobSpec(Strict):
    """Fields that every kind has."""

    kind: str
    name: str = Field(
        min_length=1, max_length=80, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="of the run, in lists"
    )
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="of weights, inputs and the order of the text")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where the cluster has a GPU")
    memory_gib: float | None = Field(
        default=None, gt=0, description="most that a point may use; None: what the device has"
    )
    isolation: Literal["process", "warm"] = Field(
        default="process",
        description="process: a new one for each point; warm: one serves many until a point is not ok",
    )
    retries: int = Field(default=1, ge=0, le=10, description="how often a lost point is handed out again")
    env: Annotated[
        list[_Variables], _listed(dict[str, str] | list[dict[str, str]]), Field(min_length=1), AfterValidator(_distinct)
    ] = Field(
        default=[{}], description="environment variables, or a list of such sets: every point is measured under each"
    )
    only: list[str] = Field(default=[], description="labels of the points to measure; none: all")
    requires_preflight: bool = Field(
        default=False,
        description="true: refused unless every GPU that points may get had a preflight within a day, and none is BAD",
    )
    python: Annotated[
        list[_Interpreter | None],
        _listed(str | list[str | None] | None),
        Field(min_length=1),
        AfterValidator(each_once),
    ] = Field(default=[None], description="path of an interpreter, or a list of them; None: the orchestrator's own")
    resources: Resources = Resources()
    deadlines: Deadlines = Deadlines()

    @field_validator("requires_preflight")
    @classmethod
    def _of_gpus(cls, required: bool, earlier: ValidationInfo) -> bool:
        if required and earlier.data.get("device") == "cpu":
            raise ValueError("a CPU has no preflight; leave it out")
        return required

    @property
    def settings(self) -> list[str]:
        """Names of all environment variables that the spec sets, sorted: each point reads all of them back."""
        return sorted({name for env in self.env for name in env})

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether points get time to save a checkpoint before they are killed, and go on from it."""
        return False

    @property
    def world_size(self) -> int:
        """Ranks of a point, which share its resources equally; on a cluster they may run on several nodes."""
        return 1

    def all_points(
        self, machines: Mapping[str | None, Machine], ended: Sequence[EndedPoint] | None = None
    ) -> list[Point]:
        """`points`, or the `next_points` after those that have `ended`, under every interpreter and environment.

        Those of one interpreter and environment follow each other, so that a warm process serves them all. `machines`
        is the machine as each interpreter finds it.
        """
        found = []
        for (row, python), (column, env) in product(enumerate(self.python), enumerate(self.env)):
            text, ending = env_text(env), ""
            for field, values, name, index in (("python", self.python, python, row), ("env", self.env, text, column)):
                if name is not None and len(values) > 1:
                    ending += f" [{name}]" if len(name) <= _READABLE else f" [{field} {index}]"
            if ended is None:
                points = self.points(machines[python])
            else:
                own = [each for each in ended if (each.point.python, each.point.env) == (python, env)]
                points = self.next_points(machines[python], own)
            for point in points:
                axes = replace(point.axes, env=text, python=python)
                found.append(replace(point, label=point.label + ending, axes=axes, env=env, python=python))
        return found

    @abstractmethod
    def points(self, machine: Machine) -> Sequence[Point]:
        """Points of the job on `machine`, in the order to measure them; with a `skip_reason` if predicted not to fit.
        Raises SpecError: an implementation cannot run on the machine."""

    def next_points(self, machine: Machine, ended: Sequence[EndedPoint]) -> Sequence[Point]:
        """Points that follow from those that have ended, for a search that a fixed list cannot hold.

        Asked whenever a point has ended, and again when a run is resumed; the answer depends on nothing else. Points
        whose labels are planned already count once.
        """
        return ()

    def notes(self) -> Sequence[str]:
        """Lines that a dry run adds to its points. Raises SpecError, too, for what would end them."""
        return ()

    def paths(self) -> Mapping[str, Path]:
        """Files and folders that the points read, by field name.

        Relative ones are uploaded with the job, to the same relative path; absolute ones must exist on the workers.
        """
        return {}
