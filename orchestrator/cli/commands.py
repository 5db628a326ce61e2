"""The `nsa` command line. Each command reads its arguments, makes one call and prints the result.

Commands import what they need themselves: with all of it, pandas and SQLAlchemy, a start takes seconds. Here are those
on the installation, its services and its database.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from jobs.schema.plain_text import in_a_line, shown
from jobs.specs.spec import SpecError
from orchestrator import terminal
from orchestrator.cli import result_commands, run_commands
from orchestrator.cli.run_commands import SPECS, Runs
from orchestrator.errors import UserError
from orchestrator.settings import SOURCES, check_current_folder, load_settings, misspelled
from orchestrator.terminal import say

UsageError: Any = typer.BadParameter.__base__
"""A wrong option or argument: click's class, of which newer versions of Typer have a copy without a public name."""

_STATUS_LINES = 20  # of a section

app = typer.Typer(
    name="nsa",
    help="Benchmarks of Native Sparse Attention: submit jobs, follow them, and judge their results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
db = typer.Typer(help="The results database.", no_args_is_help=True)
app.add_typer(run_commands.app)
app.add_typer(result_commands.app)
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
    specs = sorted(SPECS.glob("*.yaml"))
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
    from orchestrator.execute.ray_http import ray_jobs
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


def reference_data() -> list[Path]:
    """Results that come with the package: tables of others' figures, our own journals (a link to docs/results/data)."""
    folder = SOURCES / "orchestrator" / "reference_data"
    return [*sorted(folder.glob("*.csv")), *sorted((folder / "journals").glob("*.jsonl.gz"))]


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
