"""Console summary of a run: its states, the fitted exponents, the verdict with its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console

from jobs.schema.axes import MORE, more_columns
from jobs.schema.quantities import Role, readable, said_in_its_own_unit
from jobs.schema.states import PointState, Result
from orchestrator.report.table import Table
from orchestrator.terminal import PlainConsole

if TYPE_CHECKING:
    import pandas as pd

    from orchestrator.judge.analysis import Fit
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.verdicts import TargetVerdict
    from orchestrator.store import Store

_ANSWER = {Result.GO: "yes", Result.NO_GO: "no", Result.UNKNOWN: "?"}
_STYLE = {Result.NO_GO: "bold red", Result.GO: "bold green", Result.UNKNOWN: "bold yellow"}
_WIDTH_OF_A_PIPE = 200


def wide_console() -> Console:
    """Console on standard output, 200 columns wide if that is a file or a pipe."""
    return PlainConsole(width=None if Console().is_terminal else _WIDTH_OF_A_PIPE)


def print_states(states: Counter[PointState], console: Console) -> None:
    """Print the number of points by state."""
    rows = [[str(state), str(states[state])] for state in PointState if states[state]]
    console.print(Table("Points", "", ["state", "points"], rows).rich())


def print_evaluation(store: Store, run_id: str, gates_file: Path | None, console: Console) -> None:
    """Print the run's results (a bench's tables, else fits, else metrics) and its verdicts, and store the verdicts."""
    from orchestrator.judge.analysis import scaling_fits
    from orchestrator.judge.decisions import decisions
    from orchestrator.judge.verdicts import evaluate, load_gates, save_verdicts
    from orchestrator.report import bench, bench_text
    from orchestrator.store import queries

    if benches := bench.collect(store, [run_id]):
        for table in bench_text.tables(benches):
            if table.rows:
                console.print(table.rich())
                console.print(table.note, style="dim", markup=False)
    else:
        headline = queries.quantities(store, [run_id]).names(role=Role.HEADLINE)
        fits = [fit for fit in scaling_fits(queries.scaling(store, run_ids=[run_id])) if fit.metric in headline]
        if fits:
            print_fits(fits, console)
        else:
            print_results(queries.measurements(store, run_ids=[run_id]), headline, console)
    gates = load_gates(gates_file)
    verdicts = evaluate(store, gates, run_ids=[run_id])
    save_verdicts(store, run_id, verdicts)
    print_decisions(decisions(gates, verdicts), console)


def print_results(metrics: pd.DataFrame, headline: Sequence[str], console: Console) -> None:
    """Print the headline quantities, a row per point; nothing if there are none."""
    names = [name for name in headline if name in set(metrics["metric"])]
    shown = metrics.loc[metrics["metric"].isin(names)]
    if shown.empty:
        return
    units = dict(zip(shown["metric"], shown["unit"], strict=True))
    spoken = {name for name, unit in units.items() if said_in_its_own_unit(unit)}
    titles = [name if units[name] == "1" or name in spoken else f"{name} ({units[name]})" for name in names]
    rows = []
    for label, group in shown.groupby("label", sort=False):
        values = dict(zip(group["metric"], group["value"], strict=True))
        texts = {name: readable(values[name], units[name] if name in spoken else "1") for name in values}
        rows.append([str(label), *(texts.get(name, "") for name in names)])
    console.print(Table("Results", "", ["point", *titles], rows).rich())


def print_fits(fits: Sequence[Fit], console: Console) -> None:
    """Print the fitted growth, a row per series and metric."""
    from orchestrator.report.bench_text import LAW, law_cells

    rows = []
    for fit in fits:
        named = [fit.series[name] for name in ("implementation", "workload", "pass")]
        own = [f"{name.removeprefix(MORE)} {fit.series[name]}" for name in more_columns(fit.series)]
        series = " ".join([*filter(None, named), *own])
        rows.append([series, fit.metric, *law_cells(fit, fit.local)[:-1]])
    console.print(Table("Growth with sequence length S", "", ["series", "metric", *LAW[:-1]], rows).rich())


def print_decisions(decisions: Sequence[Decision], console: Console) -> None:
    """Print each decision that has evidence of its machines in a sentence, then the rules; name the others."""
    blank = []
    for decision in decisions:
        shown = [each for each in decision.verdicts if each.measured]
        if not shown:
            blank.append(decision.name)
            continue
        title = f"{decision.result}  {decision.name}: {decision.title}"
        console.print(title, style=_STYLE[decision.result], markup=False)
        console.print(f"  {decision.sentence}", markup=False, soft_wrap=True)
        print_verdicts(shown, console)
        if any(each not in shown for each in decision.verdicts if each.hardware):
            console.print(f"  what would settle the rest: nsa plan {decision.name}", markup=False)
    if blank:
        console.print(f"no evidence in this run for {', '.join(blank)}", markup=False)


def print_gate(decisions: Sequence[Decision], console: Console, *, why: bool = False) -> None:
    """Print a line a machine: the verdict, the answers, what it would cost to find out; of one target also the words.

    Args:
        why: also each rule with its evidence, and the SQL of the figures.
    """
    from orchestrator.judge.decisions import query
    from orchestrator.judge.rules import QUESTIONS
    from orchestrator.judge.steps import merged, total

    for decision in decisions:
        title = f"{decision.result}  {decision.name}: {decision.title}"
        console.print(title, style=_STYLE[decision.result], markup=False)
        asked = [each for each in QUESTIONS if any(each in verdict.questions for verdict in decision.verdicts)]
        head = "".join(f"{question:<10}" for question in asked)
        console.print(f"  {'':<13} {'':<8}{head}to find out", style="dim", markup=False)
        for verdict in decision.verdicts:
            machine = verdict.hardware.title if verdict.hardware else "any machine"
            answers = [verdict.questions.get(question) for question in asked]
            answered = "".join(f"{_ANSWER[result] if result else '':<10}" for result in answers)
            left = total(merged(rule.step for rule in verdict.rules if rule.step))
            console.print(f"  {machine:<13} {verdict.result:<8}{answered}{left}".rstrip(), markup=False, soft_wrap=True)
        if len(decisions) > 1 and not why:
            continue
        for sentence in decision.sentences:
            _wrapped(console, sentence)
        if len(decision.verdicts) == 1:
            for step in decision.steps:
                console.print(f"  {step.command or step.lacking}", style="cyan", markup=False, soft_wrap=True)
                _wrapped(console, f"{total([step])}; settles {', '.join(step.settles)}".removeprefix("; "), "    ")
        elif decision.steps:
            console.print(f"  the commands: nsa plan {decision.name}", markup=False)
        if why:
            print_verdicts([each for each in decision.verdicts if each.judged or not each.hardware], console)
            for verdict in decision.verdicts:
                if sql := query(verdict):
                    console.print(f"  the figures of {verdict.name}:\n{sql}", markup=False, soft_wrap=True)
    if len(decisions) > 1 and not why:
        console.print("why: nsa gate TARGET [--on MACHINE] [--why]", markup=False)


def _wrapped(console: Console, text: str, indent: str = "  ") -> None:
    for line in wrap(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False):
        console.print(line, markup=False, soft_wrap=True)


def print_verdicts(verdicts: Sequence[TargetVerdict], console: Console) -> None:
    """Print each verdict's name, then a line per rule: result, value against bound, margin, reason."""
    for target in verdicts:
        console.print(f"{target.result}  {target.name}", style=_STYLE[target.result], markup=False)
        if len(target.commits) > 1:
            console.print(f"  the rules rest on different commits: {', '.join(target.commits)}", markup=False)
        for rule in target.rules:
            judged = ""
            if rule.value is not None and rule.margin is not None:
                judged = f"{rule.told(rule.value)} (bound {rule.limit}, margin {rule.told(rule.margin)}): "
            console.print(f"  {rule.result:<7} {rule.rule}: {judged}{rule.reason}", markup=False, soft_wrap=True)
