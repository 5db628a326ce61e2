"""Axes: the coordinates along which results are compared, listed once for every package.

Database columns, views, fits, rules, imports, reports and pages take their axes from `AXES` (migrations spell theirs
out). A kind with a coordinate of its own declares it in its module's `AXES` and gives its points' values in
`Axes.more`; rules, fits, exports and pages then support it without further code.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jobs.schema.plain_text import shown

Coordinate = str | int
_LONGEST = 400  # characters of a coordinate of a kind's own, whatever its Axis says
_WHOLE = range(-(2**53), 2**53 + 1)  # that survive JSON
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Axis:
    """One coordinate."""

    name: str  # column of the database and key in records, rules and addresses
    type: Literal["text", "whole"]  # of its values
    label: str  # in tables and filters
    size: int = 40  # characters of the longest text, or bytes of the integer, in the database
    # Whether points that differ in it belong to different curves: not the length, the curves' x axis, and the batch,
    # which is divided out of times and memory.
    in_series: bool = True

    @property
    def attribute(self) -> str:
        """The Python attribute: `pass` is a keyword."""
        return f"{self.name}_" if self.name == "pass" else self.name


# A kind's own, of those with a model: the sizes of one that is no preset, and what differs of its nsa.
MODEL = Axis("model", "text", "model's sizes", size=400)

# The name in views, rules and reports of an implementation that specs and points name by its backend.
RESULTS_NAME = {"triton": "nsa"}

MORE = "axis_"  # prefix of the columns of frames and exports with a kind's own axes


def more_columns(columns: Iterable[str]) -> list[str]:
    """Columns of a frame or an export that hold a kind's own axes, sorted."""
    return sorted(column for column in columns if column.startswith(MORE))


def _axis(label: str, kind: Literal["text", "whole"], size: int, *, in_series: bool = True) -> Any:
    return field(default=None, metadata={"label": label, "type": kind, "size": size, "in_series": in_series})


@dataclass(frozen=True)
class Axes:
    """A point's coordinates; None if a coordinate has no meaning for the kind."""

    implementation: str | None = _axis("implementation", "text", 120)  # "chunked", "naive", "dense", ...
    workload: str | None = _axis("workload", "text", 40)  # "attention" or "model"
    pass_: str | None = _axis("pass", "text", 40)  # "forward", "forward+backward", "train"
    seq_len: int | None = _axis("S", "whole", 8, in_series=False)
    batch: int | None = _axis("batch", "whole", 4, in_series=False)
    query_heads: int | None = _axis("query heads", "whole", 4)
    kv_heads: int | None = _axis("kv heads", "whole", 4)
    head_dim: int | None = _axis("head dim", "whole", 4)
    layers: int | None = _axis("layers", "whole", 4)
    dtype: str | None = _axis("dtype", "text", 20)
    device: str | None = _axis("device", "text", 20)
    env: str | None = _axis("environment variables", "text", 400)  # "NAME=value NAME=value", sorted; None: none set
    python: str | None = _axis("interpreter", "text", 400)  # path; None: the orchestrator's own
    more: Mapping[str, Coordinate] = field(default_factory=dict)  # the kind's own, by name

    def to_record(self) -> dict[str, Coordinate | None]:
        """All coordinates in one mapping, as the journal keeps them."""
        return {**{axis.attribute: getattr(self, axis.attribute) for axis in AXES}, **self.more}


AXES: tuple[Axis, ...] = tuple(
    Axis(spec.name.removesuffix("_"), **spec.metadata) for spec in fields(Axes) if "label" in spec.metadata
)

# Columns of the reporting views, with which an axis of the same name would collide.
_TAKEN = {axis.name for axis in AXES} | {axis.attribute for axis in AXES} | {"gpu", "job", "run_name", "more", "axes"}


def check_axes(axes: Sequence[Axis]) -> None:
    """Refuse a kind's own axes whose names are taken or can be no columns. Raises ValueError."""
    for axis in axes:
        if not isinstance(axis, Axis) or axis.type not in ("text", "whole"):
            raise ValueError(f"AXES: {axis!r}: is not an Axis of type 'text' or 'whole'; correct it")
        if not axis.in_series:
            raise ValueError(f"AXES: {axis.name!r}: in_series is for the length and the batch; leave it out")
        if not _NAME.fullmatch(axis.name):
            raise ValueError(f"AXES: {axis.name!r}: use at most 40 lower-case letters, digits and '_', a letter first")
        if axis.name in _TAKEN or [other.name for other in axes].count(axis.name) > 1:
            raise ValueError(f"AXES: {axis.name!r}: the name is taken; choose another")


def check_values(axes: Axes, declared: Sequence[Axis]) -> None:
    """Refuse coordinates of a point that cannot be kept, or that its kind did not declare so. Raises ValueError."""
    for axis in AXES:
        check_coordinate(axis, getattr(axes, axis.attribute))
    known = {axis.name: axis for axis in declared}
    for name, value in axes.more.items():
        if name not in known:
            raise ValueError(f"Axes.more: {name!r}: is not declared; add an Axis to the kind's AXES")
        _check(f"Axes.more: {name}", value, known[name].type, known[name].size, _WHOLE)


def check_coordinate(axis: Axis, value: object) -> None:
    """Refuse a value of one of `AXES` that does not fit its column; counts begin at 1. Raises ValueError."""
    if value is not None:
        _check(f"Axes.{axis.attribute}", value, axis.type, axis.size, range(1, 2 ** (8 * axis.size - 1)))


def check_more(more: Mapping[str, object]) -> None:
    """Refuse coordinates of a kind's own that cannot be columns, or whose values look alike. Raises ValueError."""
    for name, value in more.items():
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise ValueError(f"Axes.more: {shown(name)}: is no name of an axis; rename it")
        if value is not None:
            _check(f"Axes.more: {name}", value, "text" if isinstance(value, str) else "whole", _LONGEST, _WHOLE)


def _check(where: str, value: object, kind: Literal["text", "whole"], size: int, whole: range) -> None:
    if kind == "whole":
        fits = isinstance(value, int) and not isinstance(value, bool) and whole.start <= value < whole.stop
        use = f"an integer of {whole[0]} to {whole[-1]}"
    else:
        fits = isinstance(value, str) and value.isprintable() and len(value) <= size
        use = f"printable text of at most {size} characters"
    if not fits:
        raise ValueError(f"{where}: {shown(value)}: use {use}")
