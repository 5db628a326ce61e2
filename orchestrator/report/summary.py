"""Console summary of a run: its states, the fitted exponents, the verdict with its reasons."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from rich.console import Console

from jobs.schema.quantities import Role, readable
from jobs.schema.states import Result
from orchestrator.judge.analysis import scaling_fits
from orchestrator.judge.decisions import Decision, decisions, query
from orchestrator.judge.rules import QUESTIONS, load_gates
from orchestrator.judge.steps import merged, total
from orchestrator.judge.verdicts import TargetVerdict, evaluate, save_verdicts
from orchestrator.report import bench
from orchestrator.report.series import own_axes
from orchestrator.report.table import Table, points_table
from orchestrator.store import Store, queries

_ANSWER = {Result.GO: "yes", Result.NO_GO: "no", Result.UNKNOWN: "?"}
_STYLE = {Result.NO_GO: "bold red", Result.GO: "bold green", Result.UNKNOWN: "bold yellow"}


def print_evaluation(store: Store, run_id: str, gates_file: Path | None, console: Console) -> list[Decision]:
    """Print the run's results (a bench's tables, else fits, else metrics) and its verdicts, which are stored, too."""
    if benches := bench.collect(store, [run_id]):
        for table in bench.tables(benches):
            if table.rows:
                console.print(table.rich())
                console.print(table.note, style="dim", soft_wrap=False)
    else:
        quantities, metrics = queries.quantities(store, [run_id]), queries.measurements(store, run_ids=[run_id])
        headline = quantities.names(role=Role.HEADLINE)
        fits = [fit for fit in scaling_fits(queries.scaling(store, run_ids=[run_id])) if fit.metric in headline]
        metrics = metrics.loc[metrics["metric"].isin(headline)]
        table = points_table("Results", metrics, quantities, {})
        if fits:
            rows = []
            for fit in fits:
                named = [fit.series[name] for name in ("implementation", "workload", "pass")]
                series = " ".join(filter(None, [*named, *own_axes(fit.series)]))
                cells = bench.law_cells(fit, fit.local)
                del cells["local exponents"]
                rows.append({"series": series, "metric": fit.metric, **cells})
            table = Table.of("Growth with sequence length S", "", rows)
        if table.rows:
            console.print(table.rich())
    gates = load_gates(gates_file)
    verdicts = evaluate(store, gates, run_ids=[run_id])
    save_verdicts(store, run_id, verdicts)
    blank, found = [], decisions(gates, verdicts)
    for decision in found:
        shown = [each for each in decision.verdicts if each.measured]
        if not shown:
            blank.append(decision.name)
            continue
        console.print(f"{decision.result}  {decision.name}: {decision.title}", style=_STYLE[decision.result])
        console.print(f"  {' '.join(decision.sentences)}")
        print_verdicts(shown, console)
        if any(each not in shown for each in decision.verdicts if each.hardware):
            console.print(f"  to answer the rest: nsa plan {decision.name}")
    if blank:
        console.print(f"no evidence in this run for {', '.join(blank)}")
    return found


def print_gate(decisions: Sequence[Decision], console: Console, *, why: bool = False) -> None:
    """Print a line a machine: the verdict, the answers, what it would cost to find out; of one target also the words;
    with `why` each rule with its evidence, and the SQL of the figures."""
    for decision in decisions:
        console.print(f"{decision.result}  {decision.name}: {decision.title}", style=_STYLE[decision.result])
        asked = [each for each in QUESTIONS if any(each in verdict.questions for verdict in decision.verdicts)]
        head = "".join(f"{question:<10}" for question in asked)
        console.print(f"  {'':<13} {'':<8}{head}to find out", style="dim")
        for verdict in decision.verdicts:
            machine = verdict.hardware.title if verdict.hardware else "any machine"
            answers = [verdict.questions.get(question) for question in asked]
            answered = "".join(f"{_ANSWER[result] if result else '':<10}" for result in answers)
            left = total(merged(rule.step for rule in verdict.rules if rule.step))
            console.print(f"  {machine:<13} {verdict.result:<8}{answered}{left}".rstrip())
        if len(decisions) == 1 or why:
            _explain(decision, console)
        if why:
            print_verdicts([each for each in decision.verdicts if each.judged or not each.hardware], console)
            for verdict in decision.verdicts:
                if sql := query(verdict):
                    console.print(f"  the figures of {verdict.name}:\n{sql}")
    if len(decisions) > 1 and not why:
        console.print("why: nsa gate TARGET [--on MACHINE] [--why]")


def _explain(decision: Decision, console: Console) -> None:
    """Print a decision's sentences, then of one machine what would settle it."""
    for sentence in filter(None, decision.sentences):
        console.print(fill(sentence, 80, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    if len(decision.verdicts) == 1:
        for step in decision.steps:
            console.print(f"  {step.command or step.lacking}", style="cyan")
            text = f"{total([step])}; settles {', '.join(step.settles)}".removeprefix("; ")
            console.print(fill(text, 80, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    elif decision.steps:
        console.print(f"  the commands: nsa plan {decision.name}")


def print_verdicts(verdicts: Sequence[TargetVerdict], console: Console) -> None:
    """Print each verdict's name, then a line per rule: result, value against bound, margin, reason."""
    for target in verdicts:
        console.print(f"{target.result}  {target.name}", style=_STYLE[target.result])
        if len(target.commits) > 1:
            console.print(f"  the evidence comes from several commits: {', '.join(target.commits)}")
        for rule in target.rules:
            judged = ""
            if rule.value is not None and rule.margin is not None:
                value, margin = readable(rule.value, rule.unit), readable(rule.margin, rule.unit)
                judged = f"{value} (bound {rule.limit}, margin {margin}): "
            console.print(f"  {rule.result:<7} {rule.rule}: {judged}{rule.reason}")
