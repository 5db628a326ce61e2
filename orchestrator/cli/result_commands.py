"""Commands on results: reports, comparisons, history, and the go/no-go verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from jobs.schema.states import Result
from orchestrator import terminal
from orchestrator.cli.run_commands import SPECS, Overrides, Runs
from orchestrator.errors import UserError
from orchestrator.settings import Settings, example_spec, load_settings
from orchestrator.terminal import say

if TYPE_CHECKING:
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.rules import Gates

_TURNS = 3
_FEW_CELLS = 3  # of a history, whose readings are listed
_TARGET = "TARGET, or TARGET/HARDWARE"
_SIDE = "a run (id, beginning of one, 'last', a tag's newest), or a commit, of which the newest run with a cell counts"

Metric = Annotated[str, typer.Option(help="the quantity")]
Threshold = Annotated[float, typer.Option(min=0, max=100, help="the smallest difference that counts, in %")]
OfTurns = Annotated[int | None, typer.Option(min=1, max=100, show_default=str(_TURNS), help="measurements of a side")]
Rules = Annotated[Path | None, typer.Option(help="YAML of rules; default: NSA_GATES, else the project's own")]

app = typer.Typer()


@app.command()
def report(
    runs: Runs = None,
    format: Annotated[
        Literal["md", "html", "csv", "json"], typer.Option(help="what to print; --out decides by its suffix")
    ] = "md",
    out: Annotated[Path | None, typer.Option(help="write here: .md (charts beside it), .html, .csv, .json")] = None,
    template: Annotated[Path | None, typer.Option(help="your own: a Jinja file or a folder (docs/reports.md)")] = None,
) -> None:
    """Write the report of runs: scaling fits, comparison with reported figures, verdicts, environment."""
    from jobs.specs.load import load_spec
    from orchestrator.cli import lookup
    from orchestrator.report import template as templates

    def load(file: str, settings: Sequence[str]) -> Any:
        """A ready spec, or one of the user's own, for a template."""
        return load_spec(Path(file) if Path(file).exists() else SPECS / file, settings)

    with lookup.open_store() as store:
        run_ids = lookup.find_runs(store, runs)
        if template is None:
            text = templates.report(store, run_ids, format, out)
            say(text if out is None else f"wrote {out}")
        elif not template.is_dir():
            text = templates.render(store, template, run_ids, load, out)
            say(text.rstrip("\n") if out is None else f"wrote {out}")
        elif out is None:
            raise UserError("--out: is missing; give the folder to write the reports to")
        else:
            for path in templates.render_folder(store, template, run_ids, load, out):
                say(f"wrote {path}")


@app.command()
def compare(
    first: Annotated[str | None, typer.Argument(help=_SIDE)] = None,
    others: Annotated[list[str] | None, typer.Argument(help="what to hold against it, each as the first")] = None,
    metric: Metric = "time",
    threshold: Threshold = 2.0,
    format: Annotated[Literal["text", "md"], typer.Option(help="md: Markdown, for a pull request")] = "text",
    interleave: Annotated[Path | None, typer.Option(metavar="SPEC", help="measure it now, in turns with --at")] = None,
    at: Annotated[str | None, typer.Option(metavar="COMMIT", help="the commit to hold today's sources against")] = None,
    turns: OfTurns = None,
    overrides: Overrides = None,
    local: Annotated[bool, typer.Option("--local", help="measure on this machine, not as a job")] = False,
) -> None:
    """Compare runs or commits cell by cell. Exit 0: none got worse; 1: one did, or failed; 3: one is ambiguous, or two
    have no cell in common.

    With --interleave and --at both are measured in turns, A B A B, in one job, each turn by processes of its own.
    """
    from orchestrator.cli import console, lookup, submission
    from orchestrator.cli import interleave as turning
    from orchestrator.report import compare as comparing
    from orchestrator.report.compare import Change

    if (interleave is None) != (at is None) or (interleave is None) != bool(first and others) or (first and interleave):
        raise UserError("arguments: give two or more runs or commits, or --interleave SPEC and --at COMMIT")
    of_turns = {"--turns": turns, "--set": overrides, "--local": local}
    if interleave is None and (stray := [name for name, given in of_turns.items() if given]):
        raise UserError(f"{', '.join(stray)}: without --interleave nothing is measured; give it, or remove this")
    settings = load_settings()
    if interleave and at:
        if not local:
            more = ["--metric", metric, "--threshold", str(threshold), "--format", format]
            job = submission.submit_turns(settings, interleave, at, overrides or (), turns or _TURNS, more)
            raise typer.Exit(submission.follow(settings, job))
        named = {"--at": at}
        with lookup.open_store(settings, create=True, readonly=False) as store, turning.sources_at(named) as sources:
            order = turning.Turns(settings, interleave, overrides or (), turns or _TURNS)
            sides = order.measure(store, [*sources, turning.today()])
            found = comparing.compare(store, sides[0], sides[1:], metric, threshold / 100)
    else:
        with lookup.open_store(settings) as store:
            sides = [lookup.find_side(store, text) for text in (first or "", *(others or ()))]
            found = comparing.compare(store, sides[0], sides[1:], metric, threshold / 100)
    for each in found:
        for table in comparing.tables(each):
            console.show(table, format)
    changes = {cell.change for each in found for cell in each.cells}
    untold = Change.AMBIGUOUS in changes or not all(each.cells for each in found)
    raise typer.Exit(1 if changes & {Change.FAILED, Change.WORSE} else 3 if untold else 0)


@app.command()
def bisect(
    good: Annotated[str, typer.Argument(help="a commit of this checkout that is fast enough")],
    bad: Annotated[str, typer.Argument(help="a later one that is too slow")],
    spec: Annotated[Path, typer.Argument(help="YAML spec to measure; few points are soon measured")],
    metric: Metric = "time",
    threshold: Threshold = 2.0,
    turns: OfTurns = None,
    overrides: Overrides = None,
) -> None:
    """Find the commit that made a spec's worst cell worse, by measuring each in turns with GOOD, on this machine.

    Exit 0: it is found; 1: it is one of several, as some could not be measured or told; 3: BAD is not worse than GOOD.
    """
    from orchestrator.cli import interleave, lookup

    settings = load_settings()
    with lookup.open_store(settings, create=True, readonly=False) as store:
        order = interleave.Turns(settings, spec, overrides or (), turns or _TURNS)
        commits, worst = interleave.bisect(store, order, good, bad, metric, threshold / 100)
    if worst is None:
        say(f"no cell is proven worse at {bad} than at {good}")
        raise typer.Exit(3)
    say(f"first worse: {' or '.join(commits)}")
    raise typer.Exit(int(len(commits) > 1))


@app.command()
def history(
    words: Annotated[list[str] | None, typer.Argument(help="only cells with these, e.g. nsa forward 2048")] = None,
    metric: Metric = "time",
    name: Annotated[str | None, typer.Option(help="only runs of this name, as `nsa runs` lists them")] = None,
    threshold: Threshold = 2.0,
    limit: Annotated[int, typer.Option(min=1, max=10**6, help="most changes to list")] = 20,
    format: Annotated[Literal["text", "md"], typer.Option(help="md: Markdown")] = "text",
) -> None:
    """When a cell changed, over commits and time: between which two, in a step or creeping, and if it may be noise.

    Of up to three cells every reading is listed, with what else changed: driver, toolchain, card.
    """
    from orchestrator.cli import console, lookup
    from orchestrator.report import history as histories
    from orchestrator.store import queries

    with lookup.open_store() as store:
        found = histories.histories(store, metric, name, words or (), threshold / 100)
        quantity = queries.quantities(store).of(metric)
    tables = [histories.changes_table(found, quantity, limit)]
    tables += [histories.readings_table(each, quantity) for each in found] if len(found) <= _FEW_CELLS else []
    for table in tables:
        console.show(table, format)
    if changes := histories.all_changes(found):
        _, first = changes[0]
        say(f"to compare the first: nsa compare {first.before.run_id} {first.after.run_id} --metric {metric}")


@app.command()
def fleet() -> None:
    """Which card is ill, by the stored runs of kind preflight, and what to do. Exit 0: all OK or WARN; 1: one is BAD;
    3: one is UNKNOWN."""
    from orchestrator.cli import console, lookup
    from orchestrator.judge.fleet import Level, judge_cards
    from orchestrator.report import fleet as tables

    with lookup.open_store() as store:
        cards = judge_cards(store)
    if not cards:
        command = f"nsa submit {example_spec('preflight')} --set cards=8"
        raise UserError(f"fleet: no preflight is stored; look at all cards: {command}")
    for table in (tables.summary(cards), tables.to_do(cards)):
        if table.rows:
            console.out.print(table.rich(fold=True))
    levels = {card.level for card in cards}
    raise typer.Exit(1 if Level.BAD in levels else 3 if Level.UNKNOWN in levels else 0)


@app.command()
def gate(
    target: Annotated[str | None, typer.Argument(help=f"{_TARGET}; none: all targets")] = None,
    on: Annotated[str | None, typer.Option(help="the machine, e.g. 1x-h200; none: all of the target's")] = None,
    runs: Annotated[list[str] | None, typer.Option("--run", help="judge this run alone, or these")] = None,
    gates: Rules = None,
    why: Annotated[bool, typer.Option("--why", help="each rule with its evidence, and the figures' SQL")] = False,
    check: Annotated[bool, typer.Option("--check", help="read the rules only: 2, and a line for each mistake")] = False,
) -> None:
    """Judge stored results on each machine asked. Exit 0: GO on all of them; 1: NO-GO on one; 3: UNKNOWN on one."""
    from orchestrator.cli import lookup
    from orchestrator.judge.decisions import decisions
    from orchestrator.judge.verdicts import evaluate, save_verdicts
    from orchestrator.run.gates import own_gates
    from orchestrator.store import Store, StoreError

    settings = load_settings()
    rules = own_gates(gates or settings.gates).only(target).on(on)
    if check:
        say(f"{len(rules.targets)} targets with {sum(len(each.rules) for each in rules.targets)} rules: no mistake")
        return
    with Store.open(settings.database, create=False, readonly=True) as store:
        verdicts = evaluate(store, rules, lookup.find_runs(store, runs) if runs else None)
    if not (runs or gates or target or on):  # the standing rules on all stored results: shown by v_gate
        try:
            with Store.open(settings.database, create=False) as store:
                save_verdicts(store, None, verdicts)
        except StoreError as err:
            terminal.warn(f"warning: {err}; v_gate keeps the verdicts of before")
    _conclude(decisions(rules, verdicts), why=why)


@app.command()
def plan(
    target: Annotated[str | None, typer.Argument(help=f"{_TARGET}; none: all targets")] = None, gates: Rules = None
) -> None:
    """List the commands that would settle what is UNKNOWN, in the order to run, and what no command settles."""
    from orchestrator.cli import console
    from orchestrator.run.gates import own_gates

    settings = load_settings()
    rules = own_gates(gates or settings.gates).only(target)
    console.plan(_decide(settings, rules))


@app.command()
def resolve(
    target: Annotated[str, typer.Argument(help=_TARGET)],
    gates: Rules = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say which commands would run, and run none")] = False,
) -> None:
    """Run the plan's commands that this cluster can run, one after the other, then judge. Exit codes: as `nsa gate`."""
    from orchestrator.cli import submission
    from orchestrator.run.gates import own_gates

    settings = load_settings()
    rules = own_gates(gates or settings.gates).only(target)
    submission.run_steps(settings, [step for each in _decide(settings, rules) for step in each.steps], dry_run=dry_run)
    _conclude(_decide(settings, rules))


def _decide(settings: Settings, rules: Gates) -> list[Decision]:
    """The decisions by what is stored; before anything was, by nothing."""
    from orchestrator.cli import lookup
    from orchestrator.judge.decisions import decisions
    from orchestrator.judge.verdicts import evaluate, judge

    if settings.no_database_yet:
        return decisions(rules, judge([], rules))
    with lookup.open_store(settings) as store:
        return decisions(rules, evaluate(store, rules))


def _conclude(found: Sequence[Decision], *, why: bool = False) -> NoReturn:
    from orchestrator.cli import console
    from orchestrator.report import summary

    summary.print_gate(found, console.out, why=why)
    results = {each.result for each in found}
    raise typer.Exit(1 if Result.NO_GO in results else 3 if Result.UNKNOWN in results else 0)
