"""Series of a chart: their keys, distinguishing labels and colours. Pure Python.

The palette begins with the colour-blind-safe one of Okabe and Ito; three colours are added for benches, which have more
series.
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
        one: (text(row["implementation"]) or "?") + (" (reported)" if mixed and row["origin"] == "reported" else "")
        for one, row in series.items()
    }
    more = sorted({column for row in rows for column in more_columns(row)})
    for coordinate in (*_TELLING, *more):
        names = _longer(names, {one: _coordinate(row, coordinate, quantities) for one, row in series.items()})
    return names


def shape(row: Row) -> str:
    """Layers, query/kv heads and head dimension in one text, as far as they are known."""
    layers, heads, groups, dim = (text(row.get(name)) for name in ("layers", "query_heads", "kv_heads", "head_dim"))
    parts = (f"{layers} layers" if layers else "", f"{heads}/{groups} heads" if heads else "", f"d{dim}" if dim else "")
    return " ".join(filter(None, parts))


def color(implementation: object) -> str:
    """The fixed colour of an implementation in every chart; grey if it has none."""
    return IMPLEMENTATION_COLORS.get(str(implementation).split(" ")[0].rstrip(","), GREY)


def colors(implementations: Sequence[object]) -> list[str]:
    """One colour per series: an implementation's first series gets its fixed colour, others cycle through the rest."""
    owners = {own: place for place, name in reversed(list(enumerate(implementations))) if (own := color(name)) != GREY}
    spare = [candidate for candidate in PALETTE if candidate not in owners] or list(PALETTE)
    places = {place: own for own, place in owners.items()}
    free = cycle(spare)
    return [places.get(place) or next(free) for place in range(len(implementations))]


def _longer(names: dict[str, str], additions: dict[str, str]) -> dict[str, str]:
    """The names, shared ones extended by their additions if that distinguishes any of them."""
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
    """A coordinate as text: 12.0 gives 12, None and NaN give ""."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
