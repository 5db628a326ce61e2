"""What the pages read: the store's queries, fits and verdicts, cached for as long as a glance takes.

Many browsers may look at one database, so each read is made at most once in CACHE_SECONDS. A database that is missing,
away or too old becomes a page that says what to do (`page`, `part`), never a traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import pandas as pd
import streamlit as st

from dashboard import help_pages
from orchestrator import analysis
from orchestrator.errors import UserError
from orchestrator.gates import verdicts as judging
from orchestrator.settings import Settings, load_settings
from orchestrator.store import Store, exporter, queries

CACHE_SECONDS = 2.0
LIVE_SECONDS = 2.0
IDLE_SECONDS = 5.0

P = ParamSpec("P")
R = TypeVar("R")

_read = st.cache_data(ttl=CACHE_SECONDS, max_entries=200, show_spinner=False, hash_funcs={Store: id})

runs = _read(queries.runs)
run = _read(queries.run)
points = _read(queries.points)
point = _read(queries.point)
metrics = _read(queries.metrics)
artifacts = _read(queries.artifacts)
events = _read(queries.events)
scaling = _read(queries.scaling)
measurements = _read(queries.measurements)
states = _read(queries.states)
counts = _read(queries.counts)
quantities = _read(queries.quantities)
csv = _read(exporter.to_csv)


@_read
def fits(store: Store, run_ids: Sequence[str]) -> pd.DataFrame:
    """The scaling fits of these runs, a row a fit."""
    return analysis.fits_frame(analysis.scaling_fits(queries.scaling(store, run_ids=run_ids)))


@_read
def verdicts(store: Store) -> list[judging.TargetVerdict]:
    """Every target judged on what is stored now. Raises GatesError when the rules cannot be read."""
    return judging.evaluate(store, judging.load_gates(load_settings().gates))


@_read
def last_change(store: Store) -> pd.Timestamp | None:
    """When anything was last heard of a run; None in an empty store."""
    frame = queries.runs(store, limit=20)
    latest = frame[["created_at", "ended_at", "heartbeat_at"]].max().max()
    return None if pd.isna(latest) else latest


def open_store() -> Store:
    """The configured database, opened for reading. Raises SettingsError, StoreError."""
    settings = load_settings()
    return _open(settings.database, _file(settings))


def refresh_seconds(live: bool) -> float:
    """How often a part of a page reads again: often while a run is going on."""
    return LIVE_SECONDS if live else IDLE_SECONDS


def page(render: Callable[[Store], Any]) -> Callable[[], None]:
    """A page that opens the store for `render`, and explains instead when there is nothing to read from."""

    @wraps(render)
    def guarded() -> None:
        try:
            render(open_store())
        except UserError as err:
            help_pages.explain(err)

    return guarded


def part(render: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R | None]:
    """A part of a page that runs again by itself (a fragment): the page around it cannot catch its errors."""

    @wraps(render)
    def guarded(store: Store, *args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return render(store, *args, **kwargs)
        except UserError as err:
            help_pages.explain(err)
            return None

    return guarded


def _file(settings: Settings) -> str | None:
    """Which file a SQLite database is, so that one put in its place is noticed; None for a server."""
    if not settings.database.startswith("sqlite:///"):
        return None
    path = Path(settings.database.removeprefix("sqlite:///"))
    try:
        stat = path.stat()
    except OSError:
        return None
    return f"{stat.st_dev}-{stat.st_ino}"


@st.cache_resource(ttl="10m", max_entries=4, show_spinner=False, on_release=Store.close)
def _open(url: str, file: str | None) -> Store:  # `file` is part of the cache's key only
    return Store.open(url, create=False, readonly=True)
