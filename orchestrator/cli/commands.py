"""The `nsa` command line. Each command reads its arguments, makes one call and prints the result.

Commands import what they need themselves: with all of it, pandas and SQLAlchemy, a start takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from pydantic import ValidationError

from jobs.schema.plain_text import in_a_line, shown
from jobs.schema.states import Origin, Result, RunState
from jobs.specs.spec import SpecError
from orchestrator import terminal
from orchestrator.errors import UserError
from orchestrator.settings import SOURCES, Settings, check_current_folder, example_spec, load_settings, misspelled
from orchestrator.terminal import say

if TYPE_CHECKING:
    from orchestrator.judge.decisions import Decision
    from orchestrator.judge.rules import Gates

UsageError: Any = typer.BadParameter.__base__
"""A wrong option or argument: click's class, of which newer versions of Typer have a copy without a public name."""

_SPECS = SOURCES / "jobs" / "configs"
_REFERENCE = SOURCES / "orchestrator" / "reference_data"
_TURNS = 3
_FEW_CELLS = 3  # of a history, whose readings are listed
_DATES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]
_STATUS_LINES = 20  # of a section
_TARGET = "TARGET, or TARGET/HARDWARE"
_SIDE = "a run (id, beginning of one, 'last') or a commit, of which the newest run with each cell counts"

Run = Annotated[str, typer.Argument(metavar="RUN", help="id, a unique beginning of one, its Ray job's, or 'last'")]
Runs = Annotated[list[str] | None, typer.Argument(metavar="RUN", help="run ids, or 'last'; none: all measured runs")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key of the spec")]
Metric = Annotated[str, typer.Option(help="the quantity")]
Threshold = Annotated[float, typer.Option(min=0, max=100, help="the smallest difference that counts, in %")]
OfTurns = Annotated[
    int | None, typer.Option(min=1, max=100, show_default=str(_TURNS), help="how often each side is measured")
]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="a word by which runs are found")]
Wait = Annotated[bool, typer.Option(help="follow the job's log until it ends")]
NamedPoint = Annotated[str, typer.Argument(metavar="POINT", help="RUN/NUMBER, e.g. last/0; `nsa show RUN` lists them")]
Formats = Literal["md", "html", "csv", "json"]
Rules = Annotated[Path | None, typer.Option(help="YAML of rules; default: NSA_GATES, else the project's own")]


app = typer.Typer(
    name="nsa",
    help="Benchmarks of Native Sparse Attention: submit jobs, follow them, and judge their results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
db = typer.Typer(help="The results database.", no_args_is_help=True)
app.add_typer(db, name="db")


def main() -> None:
    """The `nsa` command. Exit codes: 0 done, 1 failed or NO-GO, 2 bad input, 3 UNKNOWN (gate)."""
    terminal.prepare()
    for line in misspelled():
        terminal.warn(f"warning: {line}")
    try:
        code = app(prog_name="nsa", standalone_mode=False)
    except (UserError, SpecError) as err:
        terminal.complain(err)
        sys.exit(2)
    except UsageError as err:
        if type(err).__name__ == "NoArgsIsHelpError":
            terminal.say(err.message)
        else:
            terminal.warn(f"error: {_usage(err)}")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or int(terminal.output_lost))


def _usage(err: Any) -> str:
    """A UsageError as one line: what is wrong, and where the usage is."""
    text = err.format_message().removesuffix(".").replace("Value error, ", "")
    if isinstance(cause := err.__cause__, ValidationError):
        value = shown(cause.errors(include_url=False)[0]["input"], 200)
        text += "" if value in text else f", not {value}"
    return f"{in_a_line(text, 600)}; see `{err.ctx.command_path if err.ctx else 'nsa'} --help`"


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="folder to write to; it is made")] = Path("specs")) -> None:
    """Write the ready specs to a folder, to be changed and submitted; files that are there are kept.

    A .rayignore in the current folder keeps .env out of what `ray job submit --working-dir .` sends.
    """
    specs = sorted(_SPECS.glob("*.yaml"))
    kept = [spec.name for spec in specs if os.path.lexists(folder / spec.name)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for spec in specs:
            if spec.name not in kept:
                (folder / spec.name).write_bytes(spec.read_bytes())
    except OSError as err:
        raise UserError(f"FOLDER: {str(folder)!r}: cannot be written ({err.strerror}); name another") from None
    say(f"wrote {len(specs) - len(kept)} specs to {folder}/")
    if kept:
        say(f"kept your own: {', '.join(kept)}")
    rayignore = Path(".rayignore")  # Ray leaves .env, which may hold secrets, out of what it sends of this folder
    text = b"# Not sent by `ray job submit --working-dir`: secrets stay here.\n"
    try:
        text = rayignore.read_bytes() if os.path.lexists(rayignore) else text
        if not {b".env", b"/.env"} & {line.rstrip() for line in text.splitlines()}:
            rayignore.write_bytes(text + (b"" if text.endswith(b"\n") or not text else b"\n") + b".env\n")
            say(f"{rayignore}: now has the line .env; `ray job submit` does not send .env")
    except OSError as err:
        line = "add the line .env to it, or `ray job submit --working-dir .` sends .env with its secrets"
        terminal.warn(f"warning: {rayignore}: cannot be written ({err.strerror}); {line}")
    spec = folder / "demo.yaml"
    say(f"next:\n  nsa submit {spec} --dry-run\n  nsa up\n  nsa submit {spec}\n  nsa report last")


@app.command()
def schema(kind: Annotated[str, typer.Argument(metavar="KIND", help="kind of job, e.g. train")]) -> None:
    """Print the JSON schema of a kind's spec, by which editors complete and check it (docs/specs.md)."""
    from jobs.specs.kinds import kind_module

    say(json.dumps(kind_module(kind).Spec.model_json_schema(), indent=2))


@app.command()
def doctor() -> None:
    """List the settings and check what a job needs; exit 1 if something is broken."""
    from orchestrator.cli import console
    from orchestrator.cli import doctor as checks

    settings = load_settings()
    check_current_folder()
    console.table("Settings", ["variable", "value", "source", "meaning"], checks.setting_rows(settings))
    found = checks.findings(settings)
    rows = [(name, health, detail, "" if health is checks.OK else fix) for name, health, detail, fix in found]
    console.table("Checks", ["check", "state", "detail", "to mend it"], rows)
    raise typer.Exit(1 if any(f.health is checks.BROKEN for f in found) else 0)


@app.command()
def up(
    num_cpus: Annotated[int | None, typer.Option(help="CPU cores Ray may use; default: all")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs Ray may use; default: all")] = None,
) -> None:
    """Start a local Ray cluster and the dashboard, with the database migrated."""
    from orchestrator.cli import console, services
    from orchestrator.execute import ray_access
    from orchestrator.store import upgrade

    settings = load_settings()
    check_current_folder()
    upgrade(settings.database)
    rows = services.up(settings, num_cpus=num_cpus, num_gpus=num_gpus)
    console.services(rows)
    if ray_access.token_is_enabled():
        token = ray_access.token_file() or "RAY_AUTH_TOKEN"
        say(f"token: {token}; plain `ray` commands send it with RAY_AUTH_MODE=token, which `make env` sets in .venv")
    for what, fix in services.exposures(settings, rows[0].pid):
        terminal.warn(f"warning: {what}; {fix}")


@app.command()
def down() -> None:
    """Stop the services that `nsa up` started, and remove Ray's folder."""
    from orchestrator.cli import services

    stopped = services.down(load_settings())
    say(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


@app.command()
def status() -> None:
    """Services; nodes and GPUs, what is measured, what waits and why, and how the last day's runs ended."""
    from orchestrator.cli import console, lookup, services
    from orchestrator.execute.ray_jobs import ray_jobs
    from orchestrator.report import now

    settings = load_settings()
    console.services(services.local_services(settings))
    if settings.no_database_yet:
        say(f"no results yet: {settings.database} does not exist")
        return
    with lookup.open_store(settings) as store:
        found = now.sections(store, ray_jobs(settings) or ())
    for section in found:
        if not section.lines:
            say(f"{section.title}: {section.none}")
            continue
        console.out.print(section._replace(lines=section.lines[:_STATUS_LINES]).table.rich(fold=True))
        if (more := len(section.lines) - _STATUS_LINES) > 0:
            say(f"and {more} more: nsa runs, or the page Now")


@app.command()
def submit(
    spec: Annotated[Path, typer.Argument(help=f"YAML spec, e.g. {example_spec()}")],
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(help="continue this run: measure only its missing points")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="measure failed points again, too")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="validate and list the points, submit nothing")] = False,
    tags: Tags = None,
    note: Annotated[str | None, typer.Option(help="a text that is shown with the run")] = None,
    wait: Wait = True,
) -> None:
    """Check a spec and submit it to the Ray cluster as a job, with the files that it names by relative paths."""
    from orchestrator.cli import lookup, submission
    from orchestrator.run import driver

    settings = load_settings()
    if not spec.exists() and (_SPECS / spec.name).is_file():
        fix = f"write the ready specs with `nsa init`, then give specs/{spec.name}"
        raise UserError(f"spec: {str(spec)!r}: there is no such file here; {fix}")
    args = [str(spec), *submission.set_options(overrides or ())]
    if retry_failed and resume is None:
        raise UserError("--retry-failed: has no effect without --resume; name a run")
    if resume is not None and (tags or note is not None):
        raise UserError("--tag, --note: label a new run; label an earlier one with `nsa label RUN`")
    again = ["--retry-failed"] if retry_failed else []
    if resume is not None:
        with lookup.open_store(settings) as store:
            again = ["--resume", lookup.find_run(store, resume), *again]
    labels = [word for tag in tags or () for word in ("--tag", tag)] + ([] if note is None else ["--note", note])
    if dry_run:
        raise typer.Exit(driver.main([*args, "--dry-run", *again]))
    driver.check([*args, *labels])
    job = submission.submit(settings, spec, overrides or [], [*again, *labels])
    raise typer.Exit(int(wait and submission.follow(settings, job) != 0))


@app.command()
def rerun(
    point: NamedPoint,
    local: Annotated[bool, typer.Option("--local", help="measure on this machine, without a cluster")] = False,
    tags: Tags = None,
    wait: Wait = True,
) -> None:
    """Measure one point of a run again, as a run of its own, with the sources as they are now."""
    import tempfile

    from orchestrator.cli import lookup, repro, submission
    from orchestrator.run import driver
    from orchestrator.store import queries

    settings = load_settings()
    with lookup.open_store(settings) as store:
        row = lookup.find_named_point(store, point)
        run_row = queries.run(store, row["run_id"]) or {}
    with tempfile.TemporaryDirectory(prefix="nsa-rerun-") as folder:
        spec = Path(folder) / "rerun.yaml"
        spec.write_text(repro.spec_of(run_row, row))
        words = [word for tag in tags or () for word in ("--tag", tag)]
        if local:
            raise typer.Exit(driver.main([str(spec), "--local", *words]))
        driver.check([str(spec), *words])
        job = submission.submit(settings, spec, (), words)
    raise typer.Exit(int(wait and submission.follow(settings, job) != 0))


@app.command()
def repro(point: NamedPoint) -> None:
    """Print a shell script that measures one point again: its command, environment and commit."""
    from orchestrator.cli import lookup
    from orchestrator.cli import repro as scripts
    from orchestrator.store import queries

    with lookup.open_store() as store:
        row = lookup.find_named_point(store, point)
        say(scripts.script(queries.run(store, row["run_id"]) or {}, row))


@app.command()
def label(
    run: Run,
    tags: Tags = None,
    remove: Annotated[list[str] | None, typer.Option(metavar="TAG", help="take this tag away")] = None,
    note: Annotated[str | None, typer.Option(help="a text that is shown with the run; '' removes it")] = None,
) -> None:
    """Give a run tags and a note, by which `nsa runs` finds it."""
    from orchestrator.cli import lookup, submission

    with lookup.open_store(readonly=False) as store:
        say(submission.label_run(store, lookup.find_run(store, run), tags or (), remove or (), note))


@app.command()
def runs(
    kind: Annotated[str | None, typer.Option(help="only this job kind")] = None,
    state: Annotated[RunState | None, typer.Option(help="only this state")] = None,
    origin: Annotated[Origin | None, typer.Option(help="only these")] = None,
    search: Annotated[str | None, typer.Option(help="in id, name, source, host, person, tags and notes")] = None,
    person: Annotated[str | None, typer.Option(help="only of this submitter")] = None,
    tag: Annotated[str | None, typer.Option(help="only with this tag")] = None,
    commit: Annotated[str | None, typer.Option(help="only of the commit that begins so")] = None,
    card: Annotated[str | None, typer.Option(help="only on a GPU with this in its name, e.g. H200")] = None,
    since: Annotated[datetime | None, typer.Option(formats=_DATES, help="only begun then or later, UTC")] = None,
    until: Annotated[datetime | None, typer.Option(formats=_DATES, help="only begun before, UTC")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10**6, help="most to show")] = 20,
) -> None:
    """List runs, newest first, each with its headline figure and what differs from the run of its kind below it."""
    from orchestrator.cli import console, lookup
    from orchestrator.store import queries

    wanted: dict[str, Any] = {"kind": kind, "state": state, "origin": origin, "text": search, "person": person}
    wanted |= {"tag": tag, "commit": commit, "card": card, "limit": limit}
    wanted |= {name: day.replace(tzinfo=UTC) for name, day in (("since", since), ("until", until)) if day}
    with lookup.open_store() as store:
        found = queries.runs(store, **wanted)
        console.runs(store, found, title="Runs")


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
def show(run: Run, point: Annotated[int | None, typer.Option(help="index of one point")] = None) -> None:
    """A run with its points, or one point with its metrics."""
    from orchestrator.cli import console, lookup
    from orchestrator.store import queries

    with lookup.open_store() as store:
        run_id = lookup.find_run(store, run)
        if point is None:
            row = queries.run(store, run_id) or {}
            console.run(row, queries.points(store, run_id), queries.events(store, run_id))
        else:
            row = lookup.find_point(store, run_id, point)
            point_id = row["point_id"]
            console.point(row, queries.metrics(store, point_id), queries.artifacts(store, point_id))


@app.command()
def logs(
    run: Run,
    point: Annotated[int | None, typer.Option(help="index of a point: its stdout, stderr and dumps")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep following the job")] = False,
) -> None:
    """The log of a run's Ray job, or the text artifacts of one point."""
    from orchestrator.cli import console, lookup, submission
    from orchestrator.store import queries

    settings = load_settings()
    with lookup.open_store(settings) as store:
        run_id = lookup.find_run(store, run)
        if point is not None:
            console.artifacts(queries.artifacts(store, lookup.find_point(store, run_id, point)["point_id"]))
            return
        job = (queries.run(store, run_id) or {}).get("submission_id")
    if not job:
        raise UserError(f"RUN: {run_id!r} was not run as a Ray job, so there is no job log; give --point N")
    for text in submission.log(settings, job, follow=follow):
        say(text, end="")


@app.command()
def artifacts(
    run: Run,
    point: Annotated[int | None, typer.Option(help="index of one point; default: all")] = None,
    out: Annotated[Path | None, typer.Option(help="folder to copy the files into, as POINT/ATTEMPT/NAME")] = None,
) -> None:
    """List the files of a run's points; with --out copy them from the artifact store, verified."""
    from orchestrator.cli import console, lookup
    from orchestrator.execute.artifacts import fetch, kept_in
    from orchestrator.store import queries

    settings = load_settings()
    with lookup.open_store(settings) as store:
        run_id = lookup.find_run(store, run)
        if point is not None:
            lookup.find_point(store, run_id, point)
        files = queries.files(store, run_id, point).to_dict("records")
        run_row = queries.run(store, run_id) or {}
    columns = ["point", "attempt", "name", "size", "sha256"]
    rows = [[in_a_line(file[name], 100) for name in columns] for file in files]
    if rows:
        console.table("Files", columns, rows)
    else:
        say("no files were kept")
    if out is None:
        return
    problems = fetch(settings.artifact_store_url, files, out)
    where = f"{kept_in(run_row)} (host {run_row.get('host') or 'unknown'})"
    for problem in problems:
        terminal.warn(f"error: {problem}; the run kept its files in {where}")
    say(f"copied {len(files) - len(problems)} of {len(files)} files to {out}")
    raise typer.Exit(1 if problems else 0)


@app.command()
def cancel(run: Run) -> None:
    """Stop a run: its remaining points end as cancelled."""
    from orchestrator.cli import lookup, submission

    settings = load_settings()
    with lookup.open_store(settings, readonly=False) as store:
        say(submission.cancel_run(settings, store, lookup.find_run(store, run)))


@app.command()
def diagnose(
    attach: Annotated[str | None, typer.Option(metavar="RUN", help="id of a running run, or 'last'")] = None,
    point: Annotated[int | None, typer.Option(help="index of one running point; default: all")] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=60, help="time to watch the processes for")] = 3.0,
) -> None:
    """Memory by phase, routes, topology and warnings of a live run, without disturbing it; or of this host."""
    from orchestrator.cli import diagnose as diagnosis
    from orchestrator.cli import lookup

    check_current_folder()
    diagnosis.give_way()
    if attach is None:
        if point is not None:
            raise UserError(f"--point: {point}: has no effect without --attach; name a run")
        say(diagnosis.this_host())
        return
    with lookup.open_store() as store:
        for text in diagnosis.attach(store, attach, point, seconds):
            say(text)


@app.command()
def report(
    runs: Runs = None,
    format: Annotated[Formats, typer.Option(help="what to print; --out decides by its suffix")] = "md",
    out: Annotated[Path | None, typer.Option(help="write here: .md (charts beside it), .html, .csv, .json")] = None,
    template: Annotated[Path | None, typer.Option(help="your own: a Jinja file or a folder (docs/reports.md)")] = None,
) -> None:
    """Write the report of runs: scaling fits, comparison with reported figures, verdicts, environment."""
    from jobs.specs.load import load_spec
    from orchestrator.cli import lookup
    from orchestrator.report import template as templates

    def load(file: str, settings: Sequence[str]) -> Any:
        """A ready spec, or one of the user's own, for a template."""
        return load_spec(Path(file) if Path(file).exists() else _SPECS / file, settings)

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
    """Compare runs or commits cell by cell. Exit 0: none got worse; 1: one did, or failed; 3: one is ambiguous.

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
    raise typer.Exit(1 if changes & {Change.FAILED, Change.WORSE} else 3 if Change.AMBIGUOUS in changes else 0)


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
    words: Annotated[list[str] | None, typer.Argument(help="only cells with these, e.g. triton forward 2048")] = None,
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


def reference_data() -> list[Path]:
    """Results that come with the package: tables of others' figures, our own journals (a link to docs/results/data)."""
    return [*sorted(_REFERENCE.glob("*.csv")), *sorted((_REFERENCE / "journals").glob("*.jsonl.gz"))]


@app.command("import")
def import_(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="journals, or CSVs of reports")] = None,
    reference: Annotated[bool, typer.Option("--reference", help="our GPU runs, and what others report")] = False,
) -> None:
    """Store journals of runs made elsewhere, or results that others report."""
    from orchestrator.cli import lookup
    from orchestrator.store import importer

    paths = [*(files or ()), *(reference_data() if reference else ())]
    if not paths:
        raise UserError("FILE: is missing; name a journal or a CSV, or give --reference")
    bad = 0
    with lookup.open_store(create=True, readonly=False) as store:
        for path in paths:
            try:
                say(importer.import_file(store, path))
            except UserError as err:
                bad += 1
                terminal.complain(err)
    raise typer.Exit(2 if bad else 0)


@app.command()
def export(
    out: Annotated[Path | None, typer.Option(help="file to write: .csv or .json")] = None,
    runs: Runs = None,
    journal: Annotated[bool, typer.Option("--journal", help="the journal of one run again, for --resume")] = False,
) -> None:
    """Write the stored results of runs, one row a metric, or the journal of one that has lost it."""
    from orchestrator.cli import lookup
    from orchestrator.store import exporter
    from orchestrator.store.journal import NAME

    settings = load_settings()
    if journal:
        if len(runs or ()) != 1:
            raise UserError("--journal: is of one run; name it: nsa export RUN --journal")
        with lookup.open_store(settings) as store:
            [run_id] = lookup.find_runs(store, runs)
            say(exporter.export_journal(store, run_id, out or settings.artifacts_dir / run_id / NAME))
        return
    if out is None:
        raise UserError("--out: is missing; give it, see `nsa export --help`")
    with lookup.open_store(settings) as store:
        say(exporter.export(store, out, lookup.find_runs(store, runs)))


@db.command("upgrade")
def upgrade_database() -> None:
    """Create the database's tables and views, or bring them up to date."""
    from orchestrator.database_url import hide_password
    from orchestrator.store import upgrade

    settings = load_settings()
    upgrade(settings.database)
    say(f"{hide_password(settings.database)} is up to date")
