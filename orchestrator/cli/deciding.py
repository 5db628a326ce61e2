"""The commands about decisions: `nsa gate`, `nsa plan` and `nsa resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.schema.states import Result
from orchestrator.cli.usage import Runs
from orchestrator.settings import Settings, load_settings
from orchestrator.terminal import warn

if TYPE_CHECKING:
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.verdicts import Gates

Rules = Annotated[Path | None, typer.Option(help="YAML of rules; default: NSA_GATES, else the project's own")]
_TARGET = "TARGET, or TARGET/HARDWARE"


def gate(
    runs: Runs = None,
    gates: Rules = None,
    target: Annotated[str | None, typer.Option(help=f"only this: {_TARGET}")] = None,
) -> None:
    """Judge stored results, with reasons. Exit 0: all decisions GO; 1: one is NO-GO; 3: none is, but one is UNKNOWN."""
    from orchestrator.cli import console
    from orchestrator.cli.lookup import find_runs
    from orchestrator.judge.decisions import decisions
    from orchestrator.judge.verdicts import evaluate, load_gates, save_verdicts
    from orchestrator.report import summary
    from orchestrator.store import Store, StoreError

    settings = load_settings()
    rules = load_gates(gates or settings.gates).only(target)
    with Store.open(settings.database, create=False, readonly=True) as store:
        verdicts = evaluate(store, rules, find_runs(store, runs) if runs else None)
    if not (runs or gates or target):  # the standing rules on all stored results: shown by v_gate
        try:
            with Store.open(settings.database, create=False) as store:
                save_verdicts(store, None, verdicts)
        except StoreError as err:
            warn(f"warning: {err}; v_gate keeps the verdicts of before")
    found = decisions(rules, verdicts)
    summary.print_decisions(found, console.out)
    raise typer.Exit(_code(found))


def plan(
    target: Annotated[str | None, typer.Argument(help=f"{_TARGET}; none: all targets")] = None, gates: Rules = None
) -> None:
    """List the commands that would settle what is UNKNOWN, in the order to run, and what no command settles."""
    from orchestrator.cli import console, planning
    from orchestrator.judge.verdicts import load_gates

    settings = load_settings()
    rules = load_gates(gates or settings.gates).only(target)
    planning.check_commands(rules)
    console.plan(_decide(settings, rules))


def resolve(
    target: Annotated[str, typer.Argument(help=_TARGET)],
    gates: Rules = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say which commands would run, and run none")] = False,
) -> None:
    """Run the plan's commands that this cluster can run, one after the other, then judge. Exit codes: as `nsa gate`."""
    from orchestrator.cli import console, planning
    from orchestrator.judge.verdicts import load_gates
    from orchestrator.report import summary

    settings = load_settings()
    rules = load_gates(gates or settings.gates).only(target)
    planning.check_commands(rules)
    planning.run(settings, [step for each in _decide(settings, rules) for step in each.steps], dry_run=dry_run)
    found = _decide(settings, rules)
    summary.print_decisions(found, console.out)
    raise typer.Exit(_code(found))


def _decide(settings: Settings, rules: Gates) -> list[Decision]:
    """The decisions by what is stored; before anything was, by nothing."""
    from orchestrator.judge.decisions import decide, decisions
    from orchestrator.judge.verdicts import judge
    from orchestrator.store import Store

    if settings.no_database_yet:
        return decisions(rules, judge([], rules))
    with Store.open(settings.database, create=False, readonly=True) as store:
        return decide(store, rules)


def _code(found: Sequence[Decision]) -> int:
    results = {each.result for each in found}
    return 1 if Result.NO_GO in results else 3 if Result.UNKNOWN in results else 0
