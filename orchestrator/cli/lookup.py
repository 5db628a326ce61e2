"""Opens the database of the settings, and finds the run or point that a user names there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobs.schema.plain_text import shown
from jobs.schema.states import Origin
from orchestrator.errors import UserError
from orchestrator.settings import Settings, example_spec, load_settings
from orchestrator.store import Store, queries

if TYPE_CHECKING:
    from orchestrator.report.compare import Side

_COMMIT = 7  # hexadecimal digits by which a commit may be named


def open_store(settings: Settings | None = None, *, create: bool = False, readonly: bool = True) -> Store:
    """The database of the settings (None: those of this process), as `Store.open` opens it."""
    return Store.open((settings or load_settings()).database, create=create, readonly=readonly)


def find_run(store: Store, text: str) -> str:
    """The id of the run that `text` names: by its id, a unique beginning of it, its Ray job's submission id, or "last".

    The last is the newest measured run. Raises UserError: no run, or more than one.
    """
    if text == "last":
        newest = next(iter(queries.run_ids(store, origin=Origin.MEASURED, limit=1)), None)
        if newest is None:
            raise UserError(f"RUN: 'last': no run is stored yet; submit one: nsa submit {example_spec()}")
        return newest
    if not text:
        raise UserError("RUN: '': is empty; name a run, `nsa runs` lists them")
    every = queries.run_ids(store)
    if text in every:
        return text
    beginning = [run_id for run_id in every if run_id.startswith(text)]
    ids = beginning or [run_id for run_id, job in every.items() if job == text]
    if len(ids) != 1:
        what = "no run has this id" if not ids else f"{len(ids)} runs begin so: {', '.join(ids[:4])}"
        raise UserError(f"RUN: {shown(text)}: {what}; `nsa runs` lists them")
    return ids[0]


def find_runs(store: Store, texts: Sequence[str] | None) -> list[str]:
    """The ids of the runs that `texts` name; without texts, of all measured runs."""
    if texts:
        return [find_run(store, text) for text in texts]
    return list(queries.run_ids(store, origin=Origin.MEASURED))


def find_side(store: Store, text: str) -> Side:
    """The measured runs of the commit that begins so; else the last run, that of this id, the newest with this tag,
    or as `find_run`."""
    from orchestrator.report.compare import Side  # takes long to import

    if len(text) >= _COMMIT and (of_commit := queries.run_ids(store, origin=Origin.MEASURED, commit=text)):
        return Side(f"commit {text}", tuple(of_commit))
    tagged = []
    if text and text != "last" and text not in queries.run_ids(store):
        tagged = queries.runs(store, tag=text, origin=Origin.MEASURED, limit=1)["run_id"].tolist()
    run_id = tagged[0] if tagged else find_run(store, text)
    return Side(run_id, (run_id,))


def find_named_point(store: Store, text: str) -> Mapping[str, Any]:
    """The point that `text` names, as RUN/NUMBER. Raises UserError."""
    run, _, number = text.rpartition("/")
    if not (run and number.isdecimal() and number.isascii()):
        raise UserError(f"POINT: {shown(text)}: names no point; write RUN/NUMBER, e.g. last/0")
    return find_point(store, find_run(store, run), int(number))


def find_point(store: Store, run_id: str, index: int) -> Mapping[str, Any]:
    """A run's point by its index. Raises UserError."""
    row = queries.point(store, f"{run_id}/{index}")
    if row is None:
        raise UserError(f"--point: {index}: run {run_id} has no such point; `nsa show {run_id}` lists them")
    return row
