"""Go/no-go rules as data: validated targets from YAML. orchestrator.gates.verdicts evaluates them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from jobs.axes import AXES, MORE
from jobs.training_plan import TrainingPlan
from jobs.validation import describe
from orchestrator.errors import UserError
from orchestrator.states import FAILED, PointState

DEFAULT_GATES = Path(__file__).with_name("gates.yaml")
_SHAPE = (*(axis.name for axis in AXES if axis.name not in ("implementation", "batch")), "gpu")


class GatesError(UserError):
    """The rules cannot be used; one line per mistake: field, value, fix."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Range(_Strict):
    """Inclusive bounds."""

    at_least: int = 0
    at_most: int | None = None


Row = Mapping[str, Any]
Texts = str | tuple[str, ...]
Numbers = int | tuple[int, ...]


class _Where(_Strict):
    """Filter of points: all given fields must match. A text may be a pattern ("*H100*"); a list matches any member."""

    gpu: Texts | None = None
    job: Texts | None = Field(None, description="the run's kind: scaling, train, ...")
    run_name: Texts | None = None
    axes: dict[str, Texts | Numbers | Range] = Field({}, description="values of axes that a kind declares itself")

    def matches(self, row: Row) -> bool:
        """Whether a row of the views v_metrics or v_points matches."""
        texts = {"gpu": row["gpu"], "job": row["kind"], "run_name": row["run_name"]}
        return (
            all(_counts(value, getattr(self, name)) for name, value in texts.items())
            and all(_counts(row[axis.name], getattr(self, axis.attribute)) for axis in AXES)
            and all(_counts(row.get(MORE + name), wanted) for name, wanted in self.axes.items())
        )

    def __str__(self) -> str:
        """The filter in words, for reasons."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        given |= given.pop("axes")
        labels = {axis.name: axis.label for axis in AXES if axis.name == "seq_len"}
        return ", ".join(f"{labels.get(name, name)} {_in_words(value)}" for name, value in given.items()) or "any point"


def _in_words(value: Any) -> str:
    if isinstance(value, dict):  # a Range
        low, high = value["at_least"], value.get("at_most")
        return f">= {low:,}" if high is None else f"{low:,} to {high:,}"
    return " or ".join(map(str, value if isinstance(value, list | tuple) else [value]))


if TYPE_CHECKING:
    Where = _Where
else:  # one field per axis of AXES
    _WANTED = {"text": Texts | None, "whole": Numbers | Range | None}
    _FIELDS = {axis.attribute: (_WANTED[axis.type], Field(None, alias=axis.name)) for axis in AXES}
    Where = create_model("Where", __base__=_Where, **_FIELDS)

_ANY = Where.model_validate({})


class _Rule(_Strict):
    """Fields of every rule; `measure` tells how to get missing evidence."""

    rule: str = Field(min_length=1, max_length=80, pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1)
    measure: str = Field(min_length=1)
    where: Where = _ANY


class _Bounded(_Rule):
    at_most: float | None = None
    at_least: float | Literal["plan"] | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("give either at_most or at_least")
        return self


class ExponentRule(_Bounded):
    """Bound on the fitted exponent of the matching series; the worst one decides."""

    kind: Literal["exponent"]
    metric: str
    min_lengths: int = Field(3, ge=3)


class MetricRule(_Bounded):
    """Bound on a metric of the matching points; the worst one decides. `every`: each point must have the metric."""

    kind: Literal["metric"]
    metric: str
    unit: str
    absolute: bool = False
    every: bool = False
    min_points: int = Field(1, ge=1)


class Side(_Strict):
    """One side of a ratio; times and memory are per sequence (divided by the batch)."""

    metric: str
    where: Where = _ANY


class RatioRule(_Bounded):
    """Bound on numerator / denominator over pairs of points equal in the columns `same`; the worst pair decides.

    `every`: each point of the run that the numerator matches must have a pair.
    """

    kind: Literal["ratio"]
    numerator: Side
    denominator: Side
    same: tuple[str, ...] = _SHAPE
    every: bool = False
    min_points: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _known_columns(self) -> Self:
        unknown = set(self.same) - {*_SHAPE, "batch", "point_id", "implementation"}
        if unknown:
            raise ValueError(f"same: unknown column {sorted(unknown)[0]!r}; use some of {', '.join(_SHAPE)}")
        return self


class StatesRule(_Rule):
    """Rule that no matching point is in one of the states `none_of`."""

    kind: Literal["states"]
    none_of: tuple[PointState, ...] = tuple(sorted(FAILED))
    min_points: int = Field(1, ge=1)


_KINDS = ("exponent", "metric", "ratio", "states")
Rule = Annotated[ExponentRule | MetricRule | RatioRule | StatesRule, Field(discriminator="kind")]


class Target(_Strict):
    """A decision: GO only if every rule holds."""

    name: str = Field(min_length=1, max_length=80, pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1)
    plan: TrainingPlan | None = None
    rules: tuple[Rule, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.rules:
            raise ValueError("rules: is empty; without a rule nothing would be decided")
        names = [rule.rule for rule in self.rules]
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"rules: {sorted(double)[0]!r} comes twice; give each rule its own name")
        if self.plan is None and any(getattr(rule, "at_least", None) == "plan" for rule in self.rules):
            raise ValueError("at_least: 'plan' needs a plan; add steps, tokens_per_step and hours to the target")
        return self


class Gates(_Strict):
    """The rules of all targets."""

    targets: tuple[Target, ...]

    @model_validator(mode="after")
    def _unique(self) -> Self:
        if not self.targets:
            raise ValueError("targets: is empty; add one")
        names = [target.name for target in self.targets]
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"targets: {sorted(double)[0]!r} comes twice; give each target its own name")
        return self

    def only(self, target: str | None) -> Gates:
        """The rules of one target; None: all targets. Raises GatesError for an unknown target."""
        chosen = tuple(each for each in self.targets if target in (None, each.name))
        if not chosen:
            known = ", ".join(each.name for each in self.targets)
            raise GatesError(f"target: {target!r} is unknown; use one of {known}")
        return Gates(targets=chosen)


def load_gates(path: Path | None = None) -> Gates:
    """Read and validate the rules at `path`; None: the default gates.yaml.

    Raises:
        GatesError: the file is missing or invalid YAML, a key is unknown, a value is wrong, or a plan contradicts
            itself.
    """
    path = path or DEFAULT_GATES
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as err:
        raise GatesError(f"gates: '{path}' cannot be read ({err.strerror}); give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise GatesError(f"gates: '{path}' is not YAML ({' '.join(str(err).split())}); mend its syntax") from None
    if not isinstance(data, dict):
        raise GatesError(f"gates: '{path}' holds no mapping; start it with 'targets:'")
    try:
        return Gates.model_validate(data)
    except ValidationError as err:
        raise GatesError("\n".join(describe(err, data, "gates", _KINDS))) from None


def _counts(value: str | float | None, wanted: Texts | Numbers | Range | None) -> bool:
    """Whether a coordinate matches the wanted values; None accepts anything."""
    match wanted:
        case None:
            return True
        case Range(at_least=low, at_most=high):
            return isinstance(value, int | float) and low <= value and (high is None or value <= high)
        case int() | str():
            return _is(value, wanted)
        case _:
            return any(_is(value, each) for each in wanted)


def _is(value: str | float | None, wanted: str | int) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return fnmatchcase(value, wanted)
    return value == wanted
