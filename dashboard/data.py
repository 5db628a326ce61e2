"""Cached reads for the pages: the store's queries, fits and decisions.

Many browsers may view one database, so each read runs at most once in CACHE_SECONDS. For a database that is missing,
unreachable or too old, `explained` shows the fix instead of a traceback.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pandas as pd
import streamlit as st

from dashboard import help_pages
from orchestrator.artifact_url import is_local
from orchestrator.database_url import sqlite_path
from orchestrator.errors import UserError
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore
from orchestrator.execute.ray_http import ray_jobs
from orchestrator.judge import analysis
from orchestrator.judge.branches import BranchShares, branch_shares
from orchestrator.judge.crossover import Crossing, crossings
from orchestrator.judge.decisions import Decision, decisions
from orchestrator.judge.evidence import measured_runs
from orchestrator.judge.fleet import judge_cards
from orchestrator.judge.rules import Gates, load_gates
from orchestrator.judge.verdicts import judge
from orchestrator.report import charts, history
from orchestrator.report import runs as run_texts
from orchestrator.report.compare import Comparison, Side, compare
from orchestrator.report.history import History
from orchestrator.report.now import Section, sections
from orchestrator.report.results import Cell, cells, curve, roofline, stages
from orchestrator.settings import load_settings
from orchestrator.store import Store, exporter, queries

CACHE_SECONDS = 2.0
LIVE_SECONDS = 2.0
IDLE_SECONDS = 5.0
DOWNLOAD_BYTES = 1 << 30  # a larger file is not offered: a download passes through this process's memory

_read = st.cache_data(ttl=CACHE_SECONDS, max_entries=200, show_spinner=False, hash_funcs={Store: id})

runs = _read(queries.runs)
names = _read(queries.names)
run = _read(queries.run)
points = _read(queries.points)
point = _read(queries.point)
metrics = _read(queries.metrics)
artifacts = _read(queries.artifacts)
series = _read(queries.series)
events = _read(queries.events)
scaling = _read(queries.scaling)
measurements = _read(queries.measurements)
states = _read(queries.states)
lengths = _read(queries.lengths)
counts = _read(queries.counts)
quantities = _read(queries.quantities)
own_axes = _read(queries.own_axes)
csv = _read(exporter.to_csv)
cards = _read(judge_cards)


@_read
def run_notes(store: Store, frame: pd.DataFrame) -> dict[str, run_texts.Note]:
    """Commit, headline figure and difference from the run below, of each run of a list, by id."""
    return run_texts.notes(store, frame)


@_read
def now(store: Store, zone: ZoneInfo) -> list[Section]:
    """Sections of the page Now, with times in the zone."""
    return sections(store, ray_jobs(load_settings()) or (), datetime.now(zone))


# A run that is measured adds samples all the time: its charts are drawn again when a point ends, and every 20 seconds.
@st.cache_data(ttl=20, max_entries=32, show_spinner=False, hash_funcs={Store: id})
def kind_charts(store: Store, run_id: str, kind: str, state: str, tally: str) -> list[charts.Chart]:
    """The charts of a run's kind; `state` and `tally` are part of the cache's key only."""
    return charts.kind_charts(store, run_id, kind)


@st.cache_data(ttl=20, max_entries=200, show_spinner=False, hash_funcs={Store: id})
def answer(store: Store, run_id: str, tally: str) -> str:
    """A run's findings in words; `tally` is part of the cache's key only."""
    return run_texts.answer(store, run_id)


def running(store: Store, run_id: str) -> list[dict[Any, Any]]:
    """The points of a run that are measured just now."""
    frame = points(store, run_id)
    return frame.loc[frame["running"] > 0].to_dict("records")


@_read
def fits(store: Store, run_ids: Sequence[str]) -> pd.DataFrame:
    """Scaling fits of the runs, a row per fit."""
    return analysis.fits_frame(analysis.scaling_fits(queries.scaling(store, run_ids=run_ids)))


@_read
def comparison(store: Store, first: str, other: str, metric: str) -> Comparison:
    """Two runs' cells of a metric, compared."""
    return compare(store, Side(first, (first,)), [Side(other, (other,))], metric)[0]


@_read
def histories(store: Store, metric: str, name: str) -> list[History]:
    """The cells that runs of a name measured more than once, with their changes. Raises UserError if there are none."""
    return history.histories(store, metric, name)


@_read
def behind(store: Store, _cell: Cell, _workload: Sequence[Cell], key: str) -> tuple[list[dict], list[dict], list[dict]]:
    """Rows of a cell's curve, stages and roofline; `key` is part of the cache's key only."""
    return curve(_workload), stages(store, _cell), roofline(store, _workload)


@_read
def branches(store: Store, run_ids: Sequence[str]) -> list[BranchShares]:
    """Time by branch of every series and length of the runs for which stages are stored."""
    return branch_shares(queries.measurements(store, run_ids=run_ids))


def judged(store: Store) -> tuple[list[Decision], list[Crossing]]:
    """Decisions on all targets, and where NSA begins to pay. Raises GatesError if the rules cannot be read."""
    gates = load_gates(load_settings().gates)
    return _judged(store, gates.model_dump_json(), counts(store), last_change(store), _gates=gates)


# Judging a large store takes seconds: it is done again when something changed, and at the latest after a minute.
@st.cache_data(ttl=60, max_entries=8, show_spinner=False, hash_funcs={Store: id})
def _judged(
    store: Store, rules: str, held: dict[str, int], changed: pd.Timestamp | None, *, _gates: Gates
) -> tuple[list[Decision], list[Crossing]]:  # `rules`, `held` and `changed` are part of the cache's key only
    found = measured_runs(store, None)
    return decisions(_gates, judge(found, _gates)), crossings(found, _gates)


@_read
def results(store: Store) -> list[Cell]:
    """NSA's time beside other attentions', cell by cell. Raises GatesError if the rules cannot be read."""
    return cells(store, judged(store)[1])


@_read
def last_change(store: Store) -> pd.Timestamp | None:
    """Time of the latest start, end or heartbeat among the newest runs; None in an empty store."""
    frame = queries.runs(store, limit=20)
    latest = frame[["created_at", "ended_at", "heartbeat_at"]].max().max()
    return None if pd.isna(latest) else latest


def artifact(path: str, size: int, sha256: str, kept_in: str) -> bytes:
    """The whole content of a point's file, from the artifact store of this dashboard, with size and hash verified.

    `path` is relative to the store; `kept_in` is where the run kept it, for the message. Raises ArtifactError.
    """
    store = ArtifactStore(load_settings().artifact_store_url)
    try:
        return b"".join(store.pieces(path, size, sha256))
    except ArtifactError as err:
        raise ArtifactError(f"{err}; the run kept it in {kept_in}") from None


@_read
def missing(path: str) -> str | None:
    """The store of this dashboard if a point's file is not there; None if it is, or if only a download can tell."""
    url = load_settings().artifact_store_url
    return url if is_local(url) and not Path(url.partition("://")[2], path).is_file() else None


def open_store() -> Store:
    """The configured database, open for reading. Raises SettingsError, StoreError."""
    settings = load_settings()
    file = None  # device and inode of a SQLite file, by which its replacement is noticed
    with suppress(OSError):
        if path := sqlite_path(settings.database):
            stat = path.stat()
            file = f"{stat.st_dev}-{stat.st_ino}"
    return _open(settings.database, file)


@st.cache_resource(ttl="10m", max_entries=4, show_spinner=False, on_release=lambda store: store.engine.dispose())
def _open(url: str, file: str | None) -> Store:  # `file` is part of the cache's key only
    return Store.open(url, create=False, readonly=True)


def explained(render: Callable[..., None]) -> Callable[..., None]:
    """Wrap a page or a fragment: show user errors as explanations."""

    @wraps(render)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            render(*args, **kwargs)
        except UserError as err:
            help_pages.explain(err)

    return guarded
