"""The `nsa` command line. Each command reads its arguments, makes one call and prints the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.schema.states import Origin, RunState
from orchestrator import terminal
from orchestrator.cli import deciding, results
from orchestrator.cli.usage import Commands, Overrides, Run
from orchestrator.errors import UserError
from orchestrator.settings import check_current_folder, example_spec, load_settings, misspelled
from orchestrator.terminal import say

app = typer.Typer(
    name="nsa",
    cls=Commands,
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
    from jobs.specs.spec import SpecError

    terminal.prepare()
    for line in misspelled():
        terminal.warn(f"warning: {line}")
    try:
        app(prog_name="nsa")
    except (UserError, SpecError) as err:
        terminal.complain(err)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as end:
        sys.exit(end.code or int(terminal.output_lost()))


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="folder to write to; it is made")] = Path("specs")) -> None:
    """Write the ready specs to a folder, to be changed and submitted; files that are there are kept.

    A .rayignore in the current folder keeps .env out of what `ray job submit --working-dir .` sends.
    """
    from orchestrator.cli.packaged import RAYIGNORE, PackagedError, ignore_env, write_specs

    copied = write_specs(folder)
    say(f"wrote {len(copied.written)} specs to {folder}/")
    if copied.kept:
        say(f"kept your own: {', '.join(path.name for path in copied.kept)}")
    try:
        if done := ignore_env(Path()):
            say(f"{RAYIGNORE}: {done}; `ray job submit` does not send .env")
    except PackagedError as err:
        terminal.warn(f"warning: {err}, or `ray job submit --working-dir .` sends .env with its secrets")
    spec = folder / "demo.yaml"
    say(f"next:\n  nsa submit {spec} --dry-run\n  nsa up\n  nsa submit {spec}\n  nsa report last")


@app.command()
def doctor() -> None:
    """List the settings and check what a job needs; exit 1 if something is broken."""
    from orchestrator.cli import console, doctor
    from orchestrator.cli.doctor import Health

    settings = load_settings()
    check_current_folder()
    console.settings(doctor.setting_rows(settings))
    found = doctor.findings(settings)
    console.findings(found)
    raise typer.Exit(1 if any(f.health is Health.BROKEN for f in found) else 0)


@app.command()
def up(
    num_cpus: Annotated[int | None, typer.Option(help="CPU cores Ray may use; default: all")] = None,
    num_gpus: Annotated[int | None, typer.Option(help="GPUs Ray may use; default: all")] = None,
) -> None:
    """Start a local Ray cluster and the dashboard, with the database migrated."""
    from orchestrator.cli import console, exposure, services
    from orchestrator.store import upgrade

    settings = load_settings()
    check_current_folder()
    upgrade(settings.database)
    rows = services.up(settings, num_cpus=num_cpus, num_gpus=num_gpus)
    console.services(rows)
    console.access(exposure.token_place(), exposure.exposures(settings, rows[0].pid))


@app.command()
def down() -> None:
    """Stop the services that `nsa up` started, and remove Ray's folder."""
    from orchestrator.cli import services

    stopped = services.down(load_settings())
    say(f"stopped: {', '.join(stopped)}" if stopped else "nothing was running")


@app.command()
def status() -> None:
    """Services, and the runs that have not ended."""
    from orchestrator.cli import console, services
    from orchestrator.cli.lookup import open_store
    from orchestrator.store import queries

    settings = load_settings()
    console.services(services.status(settings))
    if settings.no_database_yet:
        say(f"no results yet: {settings.database} does not exist")
        return
    with open_store(settings) as store:
        console.runs(queries.runs(store, state="running"), title="Running")
        if len(waiting := queries.runs(store, state="pending")):
            console.runs(waiting, title="Waiting for room in the cluster")


@app.command()
def submit(
    spec: Annotated[Path, typer.Argument(help=f"YAML spec, e.g. {example_spec()}")],
    overrides: Overrides = None,
    resume: Annotated[str | None, typer.Option(help="continue this run: measure only its missing points")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="measure failed points again, too")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="validate and list the points, submit nothing")] = False,
    wait: Annotated[bool, typer.Option(help="follow the job's log until it ends")] = True,
) -> None:
    """Check a spec and submit it to the Ray cluster as a job, with the files that it names by relative paths."""
    from orchestrator.cli import submission
    from orchestrator.cli.lookup import find_run, open_store
    from orchestrator.cli.packaged import check_spec_exists
    from orchestrator.run import driver

    settings = load_settings()
    check_spec_exists(spec)
    args = [str(spec), *(item for override in overrides or [] for item in ("--set", override))]
    if retry_failed and resume is None:
        raise UserError("--retry-failed: has no effect without --resume; name a run")
    again = ["--retry-failed"] if retry_failed else []
    if resume is not None:
        with open_store(settings) as store:
            again = ["--resume", find_run(store, resume), *again]
    if dry_run:
        raise typer.Exit(driver.main([*args, "--dry-run", *again]))
    driver.check(args)
    submitted = submission.submit(settings, spec, overrides or [], again)
    say(f"submitted {submitted.job} (upload: {submitted.upload_bytes / 2**20:.2f} MiB)")
    if wait:
        for text in submission.follow(settings, submitted.job):
            say(text, end="")
        raise typer.Exit(0 if submission.job_status(settings, submitted.job) == "SUCCEEDED" else 1)


@app.command()
def runs(
    kind: Annotated[str | None, typer.Option(help="only this job kind")] = None,
    state: Annotated[RunState | None, typer.Option(help="only this state")] = None,
    origin: Annotated[Origin | None, typer.Option(help="only these")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10**6, help="most to show")] = 20,
) -> None:
    """List runs, newest first."""
    from orchestrator.cli import console
    from orchestrator.cli.lookup import open_store
    from orchestrator.store import queries

    with open_store() as store:
        console.runs(queries.runs(store, kind=kind, state=state, origin=origin, limit=limit), title="Runs")


@app.command()
def show(run: Run, point: Annotated[int | None, typer.Option(help="index of one point")] = None) -> None:
    """A run with its points, or one point with its metrics."""
    from orchestrator.cli import console
    from orchestrator.cli.lookup import find_point, find_run, open_store
    from orchestrator.store import queries

    with open_store() as store:
        run_id = find_run(store, run)
        if point is None:
            console.run(queries.run(store, run_id), queries.points(store, run_id), queries.events(store, run_id))
        else:
            row = find_point(store, run_id, point)
            point_id = row["point_id"]
            console.point(row, queries.metrics(store, point_id), queries.artifacts(store, point_id))


@app.command()
def logs(
    run: Run,
    point: Annotated[int | None, typer.Option(help="index of a point: its stdout, stderr and dumps")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep following the job")] = False,
) -> None:
    """The log of a run's Ray job, or the text artifacts of one point."""
    from orchestrator.cli import console, submission
    from orchestrator.cli.lookup import find_point, find_run, open_store, submission_of
    from orchestrator.store import queries

    settings = load_settings()
    with open_store(settings) as store:
        run_id = find_run(store, run)
        if point is not None:
            console.artifacts(queries.artifacts(store, find_point(store, run_id, point)["point_id"]))
            return
        job = submission_of(store, run_id)
    texts = submission.follow(settings, job) if follow else [submission.log(settings, job)]
    for text in texts:
        say(text, end="")


app.command()(results.artifacts)


@app.command()
def cancel(run: Run) -> None:
    """Stop a run: its remaining points end as cancelled."""
    from orchestrator.cli.cancel import cancel_run
    from orchestrator.cli.lookup import find_run, open_store

    settings = load_settings()
    with open_store(settings, readonly=False) as store:
        say(cancel_run(settings, store, find_run(store, run)))


@app.command()
def diagnose(
    attach: Annotated[
        str | None, typer.Option(metavar="RUN", help="a run that is running, as id, beginning of one, or 'last'")
    ] = None,
    point: Annotated[int | None, typer.Option(help="index of one running point; default: all")] = None,
    seconds: Annotated[float, typer.Option(min=0.5, max=60, help="time to watch the processes for")] = 3.0,
) -> None:
    """Memory by phase, routes, topology and warnings of a live run, without disturbing it; or of this host."""
    from orchestrator.cli import attaching

    check_current_folder()
    attaching.give_way()
    if attach is None:
        if point is not None:
            raise UserError(f"--point: {point}: has no effect without --attach; name a run")
        say(attaching.this_host())
        return
    from orchestrator.cli.lookup import find_run, open_store

    with open_store() as store:
        for text in attaching.attach(store, find_run(store, attach), point, seconds):
            say(text)


app.command()(results.report)
for decision in (deciding.gate, deciding.plan, deciding.resolve):
    app.command()(decision)
app.command("import")(results.import_)
app.command()(results.export)
db.command("upgrade")(results.upgrade_database)
