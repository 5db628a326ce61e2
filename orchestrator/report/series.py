"""Series of a chart: which rows belong together, what tells them apart, and which colour each has. Pure Python.

The palette begins with Okabe and Ito's, which colour-blind readers can tell apart; a bench has more series than that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from jobs.axes import MORE, more_columns
from jobs.quantities import Quantities
from orchestrator.analysis import series_columns

Row = Mapping[str, Any]

BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
WINE, OLIVE, VIOLET = "#882255", "#999933", "#6A4FC3"
GREY = "#8a8f98"
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, WINE, OLIVE, VIOLET)
IMPLEMENTATION_COLORS = {
    "chunked": BLUE,
    "triton": SKY,
    "naive": VERMILLION,
    "dense": GREEN,
    "reference": PURPLE,
    "nsa-vibe": ORANGE,
}

# What tells series apart, most telling first; then the axes of a kind's own.
_TELLING = ("metric", "pass", "workload", "shape", "dtype", "gpu", "device", "run_name", "run_id")


def key(row: Row) -> str:
    """The identity of a row's series; 12 and 12.0 are the same, None and NaN too."""
    return "|".join(text(row.get(name)) for name in series_columns(row) if name not in ("run_name", "source", "unit"))


def labels(rows: Sequence[Row], quantities: Quantities) -> dict[str, str]:
    """A name for each series (by key): its implementation and, where that is shared, what tells it apart."""
    series = {key(row): row for row in rows}
    mixed = len({row["origin"] for row in rows}) > 1
    names = {
        one: (text(row["implementation"]) or "?") + (" (reported)" if mixed and row["origin"] == "reported" else "")
        for one, row in series.items()
    }
    more = sorted({column for row in rows for column in more_columns(row)})
    for coordinate in (*_TELLING, *more):
        names = _longer(names, {one: _coordinate(row, coordinate, quantities) for one, row in series.items()})
    return names


def shape(row: Row) -> str:
    """The size of what ran: layers, query/kv heads, head dimension, as far as they are known."""
    layers, heads, groups, dim = (text(row.get(name)) for name in ("layers", "query_heads", "kv_heads", "head_dim"))
    parts = (f"{layers} layers" if layers else "", f"{heads}/{groups} heads" if heads else "", f"d{dim}" if dim else "")
    return " ".join(filter(None, parts))


def color(implementation: object) -> str:
    """The colour that an implementation has in every chart; grey for those without one."""
    return IMPLEMENTATION_COLORS.get(str(implementation).split(" ")[0].rstrip(","), GREY)


def colors(implementations: Sequence[object]) -> list[str]:
    """A colour a series: an implementation's first series has its own colour, the others share out what is left."""
    owners = {own: place for place, name in reversed(list(enumerate(implementations))) if (own := color(name)) != GREY}
    spare = [candidate for candidate in PALETTE if candidate not in owners] or list(PALETTE)
    places = {place: own for own, place in owners.items()}
    free = cycle(spare)
    return [places.get(place) or next(free) for place in range(len(implementations))]


def _longer(names: dict[str, str], additions: dict[str, str]) -> dict[str, str]:
    """Shared names with the additions, if that tells any of them apart."""
    shared = Counter(names.values())
    longer = {
        one: f"{name} · {additions[one]}" if shared[name] > 1 and additions[one] else name
        for one, name in names.items()
    }
    return longer if len(set(longer.values())) > len(set(names.values())) else names


def _coordinate(row: Row, name: str, quantities: Quantities) -> str:
    if name == "metric":
        return quantities.of(row["metric"]).legend
    if name.startswith(MORE) and text(row.get(name)):
        return f"{name.removeprefix(MORE)} {text(row[name])}"
    return shape(row) if name == "shape" else text(row.get(name))


def text(value: Any) -> str:
    """A coordinate in words: 12.0 is 12, and there is no word for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
