"""Which points a rule is about: a filter of their coordinates, and the machine that they were measured on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt, create_model, model_validator

from jobs.schema.axes import AXES, MODEL, MORE, RESULTS_NAME
from jobs.schema.training_plan import CONTEXT, PACK

LENGTH = "seq_len"
RANKS = f"{MORE}ranks"  # the GPUs that a point was measured on; kinds that use one do not declare it
_APART = {MODEL.name, PACK.name, CONTEXT.name}  # points that have such an axis are of no rule that does not name it
_SLICE = " MIG "
_ARCHITECTURES = {"A100": "sm80", "A800": "sm80", "L40S": "sm89", "H20": "sm90", "H100": "sm90", "H200": "sm90"}
_ARCHITECTURES |= {"H800": "sm90", "GH200": "sm90", "B200": "sm100"}

Row = Mapping[str, Any]  # of the view v_metrics or v_points


class Strict(BaseModel):
    """Base of the sections of a rules' file: frozen, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Range(Strict):
    """Inclusive bounds."""

    at_least: StrictInt = 0
    at_most: StrictInt | None = None

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("is empty; give at_least, at_most or both")
        if self.at_most is not None and self.at_most < self.at_least:
            raise ValueError(f"at_most: {self.at_most}: is below at_least = {self.at_least}; exchange them")
        return self


def no_common_axis(axes: dict[str, Any]) -> dict[str, Any]:
    """The values of a kind's own axes. Raises ValueError if one is an axis of all kinds."""
    if common := sorted(axes.keys() & {axis.name for axis in AXES}):
        raise ValueError(f"{common[0]}: is an axis of all kinds; write it beside axes, not below")
    return axes


Texts = str | Annotated[tuple[str, ...], Field(min_length=1)]
Numbers = StrictInt | Annotated[tuple[StrictInt, ...], Field(min_length=1)]
_OwnAxes = Annotated[dict[str, Texts | Numbers | Range], AfterValidator(no_common_axis)]


class _Where(Strict):
    """Filter of points: all given fields must match. A text may be a pattern ("*H100*"); a list matches any member."""

    gpu: Texts | None = None
    job: Texts | None = Field(None, description="the run's kind: scaling, train, ...")
    run_name: Texts | None = None
    axes: _OwnAxes = Field({}, description="values of axes that a kind declares itself")

    def matches(self, row: Row) -> bool:
        """Whether a row matches; one that has no length is of points of several, and only the rest of it counts."""
        requested = self.requested.items()
        return all(is_among(row.get(name), value) for name, value in requested if name in row or name != LENGTH)

    def also(self, more: Where) -> Where:
        """This filter with the fields that `more` gives instead of its own."""
        given = {name: getattr(each, name) for each in (self, more) for name in each.model_fields_set}
        given["axes"] = {**self.axes, **more.axes}
        return type(self).model_validate(given)  # no copy: it would keep what is cached

    def apart_in(self, other: Where) -> list[str]:
        """Columns for which both filters ask, and no value matches both."""
        mine, theirs = self.requested, other.requested
        return [column for column in mine if column in theirs and not _meet(mine[column], theirs[column])]

    @cached_property
    def requested(self) -> dict[str, Any]:
        """The requested values by column, of the fields that are given; NSA's kernels by their name in results."""
        found = {"gpu": self.gpu, "kind": self.job, "run_name": self.run_name}
        found |= {axis.name: getattr(self, axis.attribute) for axis in AXES}
        if names := found["implementation"]:
            names = (names,) if isinstance(names, str) else names
            ours = {ours for name, ours in RESULTS_NAME.items() if is_among(name, names)}
            found["implementation"] = tuple(sorted({*names} - RESULTS_NAME.keys() | ours))
        found |= {MORE + name: requested for name, requested in self.axes.items()}
        return {column: requested for column, requested in found.items() if requested is not None}

    def __str__(self) -> str:
        """The filter in words, for reasons."""
        given = self.model_dump(by_alias=True, exclude_none=True)
        given |= given.pop("axes")
        words = []
        for name, value in given.items():
            text = " or ".join(map(str, value if isinstance(value, list | tuple) else [value]))
            if isinstance(value, dict):  # a Range
                low, high = value["at_least"], value.get("at_most")
                text = f">= {low:,}" if high is None else f"{low:,} to {high:,}"
            words.append(f"{'S' if name == LENGTH else name} {text}")
        return ", ".join(words) or "any point"


if TYPE_CHECKING:
    Where = _Where
else:  # one field per axis of AXES
    _TYPES = {"text": Texts | None, "whole": Numbers | Range | None}
    _FIELDS = {axis.attribute: (_TYPES[axis.type], Field(None, alias=axis.name)) for axis in AXES}
    Where = create_model("Where", __base__=_Where, **_FIELDS)

ANY = Where.model_validate({})


def is_among(value: str | float | None, requested: Texts | Numbers | Range | None) -> bool:
    """Whether a coordinate has a requested value; None accepts anything."""
    match requested:
        case None:
            return True
        case Range(at_least=low, at_most=high):
            return isinstance(value, int | float) and low <= value and (high is None or value <= high)
        case tuple():
            return any(is_among(value, each) for each in requested)
        case str() if isinstance(value, str):
            return fnmatchcase(value, requested)
        case _:
            return value == requested


def _meet(first: Any, second: Any) -> bool:
    """Whether one value may be both requests; two patterns or ranges are not looked into."""
    if isinstance(first, tuple):
        return any(_meet(each, second) for each in first)
    if isinstance(second, tuple):
        return _meet(second, first)
    broad = all(isinstance(each, Range) or "*" in str(each) for each in (first, second))
    return broad or is_among(first, second) or is_among(second, first)


class Hardware(BaseModel):
    """A number of cards of one sort, or a CPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=40, pattern=r"^[a-z0-9][a-z0-9-]*$")  # after the slash of a verdict's
    title: str = Field(min_length=1, max_length=80)
    gpu: str | None = Field(None, min_length=1)  # pattern of the card's name as the driver gives it; None: a CPU
    gpus: StrictInt = Field(ge=0)  # cards in the machine; 0: a CPU
    architecture: str | None = Field(None, min_length=1)  # cards of the same one run the same kernels, e.g. "sm90"
    accelerator: str | None = Field(None, min_length=1)  # Ray's accelerator type of the card
    power: StrictInt | None = Field(None, ge=1)  # the card's usual power limit [W]; evidence of a lower one is doubtful
    price: float | None = Field(None, ge=0, allow_inf_nan=False)  # dollars for an hour of one GPU; None: not known

    @model_validator(mode="after")
    def _card_or_cpu(self) -> Self:
        if (self.gpus > 0) != (self.gpu is not None):
            raise ValueError("a machine with gpus has a gpu (a pattern of its name), and one without has none")
        for card, architecture in _ARCHITECTURES.items():
            taken = re.search(rf"\b{card}\b", self.gpu or "") or self.is_card(f"NVIDIA {card}")
            if taken and self.architecture not in (None, architecture):
                what = f"{self.gpu!r} takes {card}, which is {architecture}"
                raise ValueError(f"architecture: {self.architecture!r}: {what}; write that, or name the card")
        return self

    def is_card(self, name: str | None) -> bool:
        """Whether `name`, as the driver gives it, is this card; None: a CPU. A slice of a card (MIG), "NVIDIA H200 MIG
        1g.18gb", is the card only for a pattern that names MIG."""
        if self.gpu is None or name is None:
            return self.gpu is name
        # "NVIDIA A100*" is no A1000; "RTX 30*" is a 3090.
        number = re.match(r"[^*?[]*[A-Za-z]\d+(?=\*)", self.gpu)
        longer = number is not None and name[number.end() :][:1].isdigit()
        return fnmatchcase(name, self.gpu) and not longer and (_SLICE in self.gpu or _SLICE not in name)


@dataclass(eq=False)
class Scope:
    """The points that a rule is about: a filter, on one hardware if it names one."""

    where: Where
    hardware: Hardware | None = None
    whole: bool = False  # the points measured on all GPUs of the hardware; else those on one
    lengths: dict[int, Any] = field(default_factory=dict)  # of each shape of a run, as far as it was asked for
    preferred: list[Any] | None = None  # the runs that verdicts rest on first, once it was asked for

    def matches(self, row: Row) -> bool:
        """Whether a row's point was measured on the hardware, and matches the filter."""
        if any(row.get(MORE + name) is not None for name in _APART - self.where.axes.keys()):
            return False
        machine = self.hardware
        if machine is not None and machine.gpu is None and row["device"] != "cpu":
            return False
        if machine is not None and machine.gpu is not None:
            ranks = machine.gpus if self.whole else 1
            if (row.get(RANKS) or 1) != ranks or not machine.is_card(row["gpu"]):
                return False
        return self.where.matches(row)

    def __str__(self) -> str:
        return str(self.where) + (f"; on {self.hardware.title}" if self.hardware else "")
