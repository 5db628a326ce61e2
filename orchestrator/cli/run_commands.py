"""Commands on jobs and their runs: submit, list, show, follow, label, cancel, diagnose."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.schema.plain_text import in_a_line
from jobs.schema.states import Origin, RunState
from orchestrator import terminal
from orchestrator.errors import UserError
from orchestrator.settings import SOURCES, check_current_folder, example_spec, load_settings
from orchestrator.terminal import say

SPECS = SOURCES / "jobs" / "configs"
_DATES = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]

Run = Annotated[str, typer.Argument(metavar="RUN", help="id, a unique beginning of one, its Ray job's, or 'last'")]
Runs = Annotated[list[str] | None, typer.Argument(metavar="RUN", help="run ids, or 'last'; none: all measured runs")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key of the spec")]
Tags = Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="a word by which runs are found")]
Wait = Annotated[bool, typer.Option(help="follow the job's log until it ends")]
NamedPoint = Annotated[str, typer.Argument(metavar="POINT", help="RUN/NUMBER, e.g. last/0; `nsa show RUN` lists them")]

app = typer.Typer()


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
    if not spec.exists() and (SPECS / spec.name).is_file():
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
def show(run: Run, point: Annotated[int | None, typer.Option(help="index of one point")] = None) -> None:
    """A run with its points, or one point with its metrics."""
    from orchestrator.cli import console, lookup
    from orchestrator.report.runs import answer
    from orchestrator.store import queries

    with lookup.open_store() as store:
        run_id = lookup.find_run(store, run)
        if point is None:
            row = {**(queries.run(store, run_id) or {}), "answer": answer(store, run_id) or None}
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
