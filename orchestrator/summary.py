"""The closing words of a run: its states, the fitted exponents, the verdict with its reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from orchestrator.states import PointState, Result

if TYPE_CHECKING:
    from orchestrator.store import Store


def print_states(states: Counter[PointState], console: Console) -> None:
    """How many points ended in each state."""
    table = _table("Points", "state", "points")
    for state in PointState:
        if states[state]:
            table.add_row(state, str(states[state]))
    console.print(table)


def print_evaluation(store: Store, run_id: str, gates_file: Path | None, console: Console) -> None:
    """Scaling fits of the run and the verdict on it; the verdict is stored, too."""
    from orchestrator.analysis import scaling_fits
    from orchestrator.gates import evaluate, load_gates, save_verdicts
    from orchestrator.store import queries

    fits = scaling_fits(queries.scaling(store, run_ids=[run_id]))
    table = _table(
        "Growth with sequence length S: metric ~ S^exponent", "series", "metric", "exponent", "95 %", "points"
    )
    for fit in fits:
        series = " ".join(filter(None, (fit.implementation, fit.workload, fit.pass_)))
        interval = f"{fit.ci_low:.2f} .. {fit.ci_high:.2f}"
        table.add_row(series, fit.metric, f"{fit.exponent:.2f}", interval, str(fit.n))
    if fits:
        console.print(table)
    verdicts = evaluate(store, load_gates(gates_file), run_ids=[run_id])
    save_verdicts(store, run_id, verdicts)
    for target in verdicts:
        console.print(f"{target.result}  {target.name}: {target.title}", style="bold", markup=False)
        if all(rule.result is Result.UNKNOWN for rule in target.rules):
            console.print("  no rule has evidence in this run; nsa gate says what each needs")
            continue
        for rule in target.rules:
            value = "" if rule.value is None else f" {rule.value:.4g}"
            unit = "" if rule.unit in (None, "1") or not value else f" {rule.unit}"
            console.print(f"  {rule.result:<7} {rule.rule}:{value}{unit} {rule.reason}", markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
