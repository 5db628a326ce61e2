"""The list of runs: each with its headline figure, and what differs from the run of its kind below it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from jobs.schema.axes import MORE
from jobs.schema.plain_text import in_a_line
from jobs.schema.quantities import THROUGHPUT, Better, Quantity, Role, in_words, readable
from jobs.schema.states import Origin, run_in_words
from orchestrator.judge.analysis import series_columns
from orchestrator.judge.scope import RANKS
from orchestrator.report.bench import TIME, is_dense
from orchestrator.report.series import Row, named, shape, text
from orchestrator.report.table import Table, flat
from orchestrator.store import Store, queries

_MOST = 3  # differences that are shown
_VALUE = 30  # characters of one
_OURS = ("chunked", "nsa")  # NSA on a CPU and on a GPU
_LOSS = "heldout_loss"
_OF_A_RUN = ("run_id", "run_name", "source", f"{MORE}steps")
_OF_RANKS = [MORE + name for name in ("ranks", "parallel", "micro_batch", "context_parallel")]  # one rank has none


@dataclass(frozen=True)
class Note:
    """Texts beside a run in a list: commit ("+": with changes), headline figure, difference from the run below."""

    commit: str
    figure: str
    differs: str


def notes(store: Store, frame: pd.DataFrame) -> dict[str, Note]:
    """The note on each run of a list (`queries.runs`), newest first, by id."""
    rows = frame.to_dict("records")
    ids = [row["run_id"] for row in rows]
    specs, figures = queries.specs(store, ids), queries.headlines(store, ids)
    found = {}
    for place, row in enumerate(rows):
        below = next((other["run_id"] for other in rows[place + 1 :] if other["kind"] == row["kind"]), "")
        commit = (row["git_commit"] or "")[:10] + ("+" if row["git_dirty"] is True else "")
        unlike = _differences(specs[row["run_id"]], specs.get(below, {}))
        found[row["run_id"]] = Note(commit, _figure(figures.get(row["run_id"])), unlike)
    return found


def table(store: Store, frame: pd.DataFrame, title: str) -> Table:
    """Runs (`queries.runs`), newest first; a column that no run fills is left out."""
    beside, cells = notes(store, frame), []
    for row in frame.to_dict("records"):
        note = beside[row["run_id"]]
        cells.append(
            {
                "run": row["run_id"],
                "kind": row["kind"],
                "origin": row["origin"],
                "state": run_in_words(row),
                **{name: str(int(row[name])) for name in ("points", "ok", "failed")},
                "created (UTC)": f"{row['created_at']:%Y-%m-%d %H:%M:%S}",
                "commit": note.commit,
                "person": row["person"] or "",
                "tags": row["tags"],
                "headline figure": note.figure,
                "differs from the one below": note.differs,
            }
        )
    filled = [name for name in cells[0] if any(row[name] for row in cells)]
    return Table.of(title, "", [{name: row[name] for name in filled} for row in cells])


def answer(store: Store, run_id: str) -> str:
    """A run's findings in words: NSA beside the fastest dense attention, or of kind peers the fastest other
    implementation, at the longest length that has both, by the first quantity of its kind and by the held-out loss;
    else its headline figure. "" before the first."""
    numbers, quantities = queries.measurements(store, run_ids=[run_id]), queries.quantities(store, [run_id])
    present = [name for name in quantities.names(role=Role.HEADLINE) if name in set(numbers["metric"])]
    told = []
    for quantity in (quantities.of(name) for name in present if name in (present[0], _LOSS)):
        rows = numbers.loc[numbers["metric"] == quantity.name].sort_values("value")
        alike = [column for column in (*series_columns(rows), "batch") if column != "implementation"]
        both: list[tuple[Row, Row]] = []
        groups: dict[int, list[Row]] = defaultdict(list)
        numbered = rows.groupby(["seq_len", *alike], dropna=False).ngroup()
        for group, row in zip(numbered, rows.to_dict("records"), strict=True):
            groups[group].append(row)
        for group in sorted(groups):
            ordered = groups[group][:: -1 if quantity.better is Better.HIGHER else 1]
            nsa = [row for row in ordered if row["implementation"] in _OURS]
            rest = [row for row in ordered if row not in nsa]
            others = [row for row in rest if row["kind"] == "peers" or is_dense(row["implementation"] or "")]
            if nsa and others:
                both.append((nsa[0], others[0]))
        if both:
            told.append(_beside(*both[-1], quantity))
    told += [] if told else [_figure(queries.headlines(store, [run_id]).get(run_id))]
    return "; ".join(filter(None, [*told, *_efficiency(store, numbers)]))


def _efficiency(store: Store, numbers: pd.DataFrame) -> list[str]:
    """Throughput of several ranks over that of one, of the newest run alike: at the same batch, and at the same number
    of sequences a rank."""
    rows = numbers.loc[numbers["metric"] == THROUGHPUT.name].to_dict("records")
    if not any((row.get(RANKS) or 1) > 1 for row in rows):
        return []
    alike_runs = queries.runs(store, kind=rows[0]["kind"], origin=Origin.MEASURED)["run_id"]
    measured, said = queries.measurements(store, run_ids=list(alike_runs), metric=THROUGHPUT.name), []
    single = measured.iloc[::-1].to_dict("records")  # the newest first
    for row in (row for row in rows if (row.get(RANKS) or 1) > 1):
        # With the axes that only the runs on one rank have.
        ranks, same = row[RANKS], {*series_columns(measured.columns), "seq_len", "kind"}.difference(_OF_A_RUN)
        alike = []
        for one in single:
            pairs = [(name, text(one.get(name)), text(row.get(name))) for name in same]
            fit = all(mine == its or (not mine and name in _OF_RANKS) for name, mine, its in pairs)
            if pd.isna(one.get(RANKS)) and fit:
                alike.append(one)
        for batch, how in ((row["batch"], "at the same batch"), (row["batch"] / ranks, "at as many sequences a rank")):
            if one := next((one for one in alike if one["batch"] == batch), None):
                ratio = row["value"] / one["value"]
                said.append(f"{ranks:.0f} ranks {ratio:.3g} times as fast as one {how} ({one['run_id']})")
    return said


def _beside(nsa: Row, other: Row, quantity: Quantity) -> str:
    names = named(nsa["implementation"]), other["implementation"]
    if quantity.name != TIME:
        values = (
            f"{readable(row['value'], row['unit'])} of {name}" for row, name in zip((nsa, other), names, strict=True)
        )
        return f"{quantity.legend} {', '.join(values)}"
    (fast, first), (slow, second) = sorted(zip((nsa["value"], other["value"]), names, strict=True))
    length = "" if pd.isna(nsa["seq_len"]) else f" at S={nsa['seq_len']:,.0f}"
    where = ", ".join(filter(None, (nsa["pass"], shape(nsa))))
    return f"{first} is {slow / fast:.3g} times as fast as {second}{length} ({where})"


def _figure(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    length = "" if row["seq_len"] is None else f" at S={row['seq_len']:,}"
    what = named(row["implementation"] or row["label"])
    return f"{in_words(row['metric'])} {readable(row['value'], row['unit'])}, {what}{length}"


def _differences(spec: Mapping[str, Any], below: Mapping[str, Any]) -> str:
    """The fields that both specs have with other values, and the values of the first."""
    values, others = flat(spec), flat(below)
    unlike = [name for name in values if name in others and name != "name" and values[name] != others[name]]
    shown = [f"{name}={in_a_line(values[name], _VALUE)}" for name in unlike[:_MOST]]
    return ", ".join(shown) + (f" and {len(unlike) - _MOST} more" if len(unlike) > _MOST else "")
