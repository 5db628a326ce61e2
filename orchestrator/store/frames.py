"""Results of a query as pandas frames and plain dictionaries."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pandas as pd
from sqlalchemy import Select
from sqlalchemy.types import DateTime, Float, Integer, TypeDecorator

from jobs.schema.axes import MORE
from orchestrator.store.store import Store


def frame(store: Store, query: Select) -> pd.DataFrame:
    """The rows of a query; `more_axes` comes as one column "axis_<name>" per kind-specific axis."""
    with store.session() as session:
        rows = session.execute(query).all()
    columns = {column.key: column.type for column in query.selected_columns}
    found = pd.DataFrame([[_plain(value) for value in row] for row in rows], columns=list(columns), dtype=object)
    if "more_axes" in columns:
        found = _with_more_axes(found)
        del columns["more_axes"]
    for name, kind in columns.items():
        kind = kind.impl if isinstance(kind, TypeDecorator) else kind
        if isinstance(kind, DateTime):
            found[name] = pd.to_datetime(found[name], utc=True)
        elif isinstance(kind, Integer | Float):
            found[name] = pd.to_numeric(found[name])
    return found


def _with_more_axes(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `more_axes` split into one column "axis_<name>" per kind-specific axis."""
    values = [each or {} for each in frame["more_axes"]]
    frame = frame.drop(columns="more_axes")
    for name in sorted({name for each in values for name in each}):
        frame[MORE + name] = pd.Series([each.get(name) for each in values], index=frame.index, dtype=object)
    return frame


def mappings(store: Store, query: Select) -> list[dict[str, Any]]:
    """The rows of a query, a mapping each, as the database has them: `more_axes` is one column."""
    with store.session() as session:
        rows = session.execute(query).mappings().all()
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
