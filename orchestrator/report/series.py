"""Series of a chart: their keys, distinguishing labels and looks. Pure Python.

An implementation's colour and mark follow from its name alone, so that they are the same in every chart, whatever else
it shows. Series that share an implementation differ in their dashes. The colours stand out from light and dark grounds,
and from one another also for the colour-blind.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from jobs.schema.axes import MORE, more_columns
from jobs.schema.quantities import Quantities
from orchestrator.judge.analysis import NSA, named, series_columns, surroundings

Row = Mapping[Any, Any]

BLUE, SKY, VERMILLION, GREEN, VIOLET, CRIMSON = "#1B6FC0", "#4FB0E8", "#D55E00", "#12A07A", "#7A3CF0", "#BB0A3A"
PERIWINKLE, LEAF, TEAL, AMBER, BROWN, PINK = "#6E7BF2", "#77B05A", "#00687F", "#E8A000", "#7B6045", "#E07FB0"
GREY = "#8a8f98"
OTHER_COLORS = (PERIWINKLE, LEAF, TEAL, AMBER, BROWN, PINK)  # of names that are not listed below
MARKS = {"circle": "●", "square": "■", "triangle-up": "▲", "diamond": "◆", "triangle-down": "▼", "cross": "✚"}
# Dashes of a look's first, second and later series in a chart, each with its sign in the legend.
DASHES = {(1, 0): "", (7, 4): "– –", (2, 3): "· · ·", (9, 3, 2, 3): "– ·"}


class Look(NamedTuple):
    """Colour and mark (a key of MARKS) of an implementation."""

    color: str
    mark: str

    @property
    def sign(self) -> str:
        """The mark as a character, for tables."""
        return MARKS[self.mark]


LOOKS = {
    **dict.fromkeys((NSA, "nsa", "triton"), Look(BLUE, "circle")),
    "chunked": Look(SKY, "triangle-up"),
    "naive": Look(VERMILLION, "square"),
    "dense": Look(GREEN, "diamond"),
    "gather": Look(BROWN, "square"),
    "flash": Look(AMBER, "triangle-up"),
    "reference": Look(VIOLET, "triangle-down"),
    "nsa-vibe": Look(CRIMSON, "cross"),
    "dense-sdpa-flash": Look(LEAF, "diamond"),
    "dense, PyTorch cuDNN": Look(GREEN, "square"),
    "dense, PyTorch flash": Look(LEAF, "cross"),
    "dense, flash-attn-4": Look(TEAL, "diamond"),
    "Scalable-Flash-NSA": Look(AMBER, "circle"),
    "Flash-Sparse-Attention": Look(PINK, "triangle-up"),
    "native-sparse-attention-triton": Look(PERIWINKLE, "triangle-down"),
    "flash-linear-attention": Look(BROWN, "cross"),
}

# Coordinates that distinguish series, most telling first; kind-specific axes follow.
_TELLING = ("metric", "pass", "workload", "shape", "dtype", "gpu", "device", "env", "python", "run_name", "run_id")


def key(row: Row) -> str:
    """Key of a row's series; 12 equals 12.0, None equals NaN."""
    return "|".join(text(row.get(name)) for name in series_columns(row) if name not in ("run_name", "source", "unit"))


def labels(rows: Sequence[Row], quantities: Quantities) -> dict[str, str]:
    """Name of each series, by key: its implementation and, if that is shared, distinguishing coordinates."""
    series = {key(row): row for row in rows}
    mixed = len({row["origin"] for row in rows}) > 1
    names = {
        one: (named(text(row["implementation"])) or "?")
        + (" (reported)" if mixed and row["origin"] == "reported" else "")
        for one, row in series.items()
    }
    for coordinate in (*_TELLING, *sorted({column for row in rows for column in more_columns(row)})):
        shared, longer = Counter(names.values()), {}
        for one, row in series.items():
            value = text(row.get(coordinate))
            if coordinate == "metric":
                value = quantities.of(row["metric"]).legend
            elif coordinate == "shape":
                value = shape(row)
            elif coordinate.startswith(MORE) and value:
                value = f"{coordinate.removeprefix(MORE)} {value}"
            apart = value and (shared[names[one]] > 1 or coordinate == "metric")
            longer[one] = f"{names[one]} · {value}" if apart else names[one]
        if len(set(longer.values())) > len(set(names.values())):
            names = longer
    return names


def shape(row: Row) -> str:
    """Heads as "12/2 d64", with a model's layers; as far as they are known."""
    layers, heads, groups, dim = (text(row.get(name)) for name in ("layers", "query_heads", "kv_heads", "head_dim"))
    operator = " ".join(filter(None, (f"{heads}/{groups}" if heads and groups else "", f"d{dim}" if dim else "")))
    return ", ".join(filter(None, (operator, f"{layers} layers" if layers else "")))


def own_axes(row: Row) -> list[str]:
    """A kind's own axes of a row or a fit's series, as "depth 4", those that it has."""
    return [f"{name.removeprefix(MORE)} {text(row[name])}" for name in more_columns(row) if text(row[name])]


def full_shape(row: Row) -> str:
    """The shape of a row or a fit's series, with its kind-specific axes, environment variables and interpreter."""
    return ", ".join(filter(None, (shape(row), *own_axes(row), *surroundings(row))))


def look(implementation: object) -> Look:
    """The fixed colour and mark of an implementation: those of the longest name of LOOKS that it begins with, so that
    "dense, flash-attn-4 4.0" has a look; else by a hash of the name. Two may share a colour, seldom a mark as well."""
    name = text(implementation)
    known = [one for one in LOOKS if name == one or name.startswith((f"{one} ", f"{one},"))]
    if known:
        return LOOKS[max(known, key=len)]
    number = int.from_bytes(sha256(name.encode()).digest()[:4], "big")
    return Look(OTHER_COLORS[number % len(OTHER_COLORS)], list(MARKS)[number // len(OTHER_COLORS) % len(MARKS)])


def dashes(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """A dash pattern per series, given a row of each: series with one look differ, reported ones are never solid."""
    seen: Counter[tuple[Look, bool]] = Counter()
    found = []
    for row in rows:
        alike = look(row["implementation"]), row["origin"] == "reported"
        patterns = list(DASHES)[1:] if row["origin"] == "reported" else list(DASHES)
        found.append(patterns[seen[alike] % len(patterns)])
        seen[alike] += 1
    return found


def text(value: Any) -> str:
    """A coordinate as text: 12.0 gives 12, None and NaN give ""."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
