"""Filters of points by their coordinates, as rules give them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, create_model, field_validator, model_validator

from jobs.schema.axes import AXES, MORE

LENGTH = "seq_len"


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


Row = Mapping[str, Any]
Texts = str | Annotated[tuple[str, ...], Field(min_length=1)]
Numbers = StrictInt | Annotated[tuple[StrictInt, ...], Field(min_length=1)]


class _Where(Strict):
    """Filter of points: all given fields must match. A text may be a pattern ("*H100*"); a list matches any member."""

    gpu: Texts | None = None
    job: Texts | None = Field(None, description="the run's kind: scaling, train, ...")
    run_name: Texts | None = None
    axes: dict[str, Texts | Numbers | Range] = Field({}, description="values of axes that a kind declares itself")

    @field_validator("axes")
    @classmethod
    def _own(cls, axes: dict[str, Any]) -> dict[str, Any]:
        if named := sorted(axes.keys() & {axis.name for axis in AXES}):
            raise ValueError(f"{named[0]}: is an axis of all kinds; write it beside axes, not below")
        return axes

    def matches(self, row: Row) -> bool:
        """Whether a row of the views v_metrics or v_points matches."""
        return self.matches_but_length(row) and self.matches_length(row[LENGTH])

    def matches_but_length(self, row: Row) -> bool:
        """Whether all coordinates of a row match, its length aside."""
        return all(_counts(row.get(column), wanted) for column, wanted in self._asked)

    def matches_length(self, length: float | None) -> bool:
        """Whether a sequence length matches."""
        return _counts(length, getattr(self, LENGTH))

    def also(self, more: Where) -> Where:
        """This filter with the fields that `more` gives in place of its own."""
        given = {name: getattr(each, name) for each in (self, more) for name in each.model_fields_set}
        given["axes"] = {**self.axes, **more.axes}
        return type(self).model_validate(given)  # no copy: it would keep what is cached

    @cached_property
    def _asked(self) -> list[tuple[str, Any]]:
        """Columns with the wanted values, of the fields that are given, without the length."""
        found = {"gpu": self.gpu, "kind": self.job, "run_name": self.run_name}
        found |= {axis.name: getattr(self, axis.attribute) for axis in AXES if axis.name != LENGTH}
        found |= {MORE + name: wanted for name, wanted in self.axes.items()}
        return [(column, wanted) for column, wanted in found.items() if wanted is not None]

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

ANY = Where.model_validate({})


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
