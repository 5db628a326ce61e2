"""The commands about stored results: `nsa report`, `export`, `import`, `artifacts` and `db upgrade`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.usage import Format, Run, Runs
from orchestrator.errors import UserError
from orchestrator.settings import load_settings
from orchestrator.terminal import say, warn

if TYPE_CHECKING:
    from orchestrator.store import Store


def report(
    runs: Runs = None,
    format: Annotated[Format, typer.Option(help="what to print; --out decides by its suffix")] = Format.MD,
    out: Annotated[
        Path | None, typer.Option(help="write here (.md with its charts beside it, .html, .csv, .json)")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(help="a report of your own: a Jinja file (docs/reports.md), or a folder of them")
    ] = None,
) -> None:
    """Write the report of runs: scaling fits, comparison with reported figures, verdicts, environment."""
    from orchestrator import report as reports
    from orchestrator.cli.lookup import find_runs, open_store

    with open_store() as store:
        run_ids = find_runs(store, runs)
        if template is not None:
            _from_template(store, template, run_ids, out)
        elif out is None:
            say(reports.report(store, run_ids, format=format.value))
        else:
            reports.write_report(store, run_ids, out)
            say(f"wrote {out}")


def _from_template(store: Store, template: Path, run_ids: Sequence[str], out: Path | None) -> None:
    from jobs.specs.load import load_spec
    from orchestrator.judge.rules import READY_SPECS
    from orchestrator.report.template import render, render_folder

    def load(file: str, settings: Sequence[str]) -> Any:
        return load_spec(Path(file) if Path(file).exists() else READY_SPECS / file, settings)

    if template.is_dir():
        if out is None:
            raise UserError("--out: is missing; give the folder to write the reports to")
        for path in render_folder(store, template, run_ids, load, out):
            say(f"wrote {path}")
        return
    text = render(store, template, run_ids, load, out)
    say(text.rstrip("\n") if out is None else f"wrote {out}")


def import_(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE", help="journal (.jsonl, .jsonl.gz), or CSV of reported results"),
    ] = None,
    reference: Annotated[
        bool,
        typer.Option(
            "--reference", help="what comes with this package: our own GPU runs, and figures that others report"
        ),
    ] = False,
) -> None:
    """Store journals of runs made elsewhere, or results that others report."""
    from orchestrator.cli.lookup import open_store
    from orchestrator.cli.packaged import reference_data
    from orchestrator.store import importer

    paths = [*(files or ()), *(reference_data() if reference else ())]
    if not paths:
        raise UserError("FILE: is missing; name a journal or a CSV, or give --reference")
    with open_store(create=True, readonly=False) as store:
        for path in paths:
            say(importer.import_file(store, path))


def export(
    out: Annotated[Path, typer.Option(help="file to write: .csv or .json")],
    runs: Runs = None,
) -> None:
    """Write the stored results of runs, one row a metric."""
    from orchestrator.cli.lookup import find_runs, open_store
    from orchestrator.store import exporter

    with open_store() as store:
        say(exporter.export(store, out, find_runs(store, runs)))


def artifacts(
    run: Run,
    point: Annotated[int | None, typer.Option(help="index of one point; default: all")] = None,
    out: Annotated[Path | None, typer.Option(help="folder to copy the files into, as POINT/ATTEMPT/NAME")] = None,
) -> None:
    """List the files of a run's points; with --out copy them from the artifact store, verified."""
    from orchestrator.cli import console
    from orchestrator.cli.lookup import find_point, find_run, open_store
    from orchestrator.execute.artifacts import fetch, kept_in, stored_files
    from orchestrator.store import queries

    settings = load_settings()
    with open_store(settings) as store:
        run_id = find_run(store, run)
        if point is not None:
            find_point(store, run_id, point)
        files = stored_files(store, run_id, point)
        run_row = queries.run(store, run_id) or {}
    console.files(files)
    if out is None:
        return
    problems = fetch(settings.artifact_store_url, files, out)
    where = f"{kept_in(run_row)} (host {run_row.get('host') or 'unknown'})"
    for problem in problems:
        warn(f"error: {problem}; the run kept its files in {where}")
    say(f"copied {len(files) - len(problems)} of {len(files)} files to {out}")
    raise typer.Exit(1 if problems else 0)


def upgrade_database() -> None:
    """Create the database's tables and views, or bring them up to date."""
    from orchestrator.database_url import hide_password
    from orchestrator.store import upgrade

    settings = load_settings()
    upgrade(settings.database)
    say(f"{hide_password(settings.database)} is up to date")
