"""Write the pages of docs/results, the tables of the READMEs and the durations of runs, from docs/results/data alone.

`make results` runs it; given journals, it takes them in first (take_in.py). Equal journals give equal texts.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tables
from take_in import DATA, take_in

from jobs.specs.load import load_spec
from orchestrator.cli.files import reference_data
from orchestrator.errors import UserError
from orchestrator.judge.rules import READY_SPECS
from orchestrator.report import report, write_report
from orchestrator.report.template import render_folder
from orchestrator.store import Store, queries, upgrade
from orchestrator.store.importer import import_file
from orchestrator.store.journal import COMPRESSED

ROOT = Path(__file__).resolve().parents[2]
PAGES = Path("docs/results")
DURATIONS = Path("orchestrator/judge/durations.csv")
GATES = ROOT / "orchestrator" / "judge" / "gates.yaml"
CHARTED = ("scaling.md", "bench.md", "decoding.md")  # the others have one length a run, or lengths without a law
DECISIONS = """# Decisions

The answers of `nsa gate` and `nsa plan`, with the committed journals alone in the database.

## nsa gate

Exit code {code}: {meaning}.

```text
{gate}
```

## nsa plan

What would settle the rest.

```text
{plan}
```
"""
EXIT_CODES = {0: "every decision is GO", 1: "one is NO-GO", 3: "none is NO-GO, one is UNKNOWN"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journals", nargs="*", type=Path, metavar="JOURNAL", help="journals to take in first")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder to write to, in place of the checkout")
    given = parser.parse_args()
    try:
        for path in given.journals:
            print(f"took in {take_in(path).relative_to(ROOT)}")
        for path in generate(given.root):
            print(f"wrote {path}")
    except UserError as err:
        sys.exit(f"error: {err}")


def generate(root: Path) -> list[Path]:
    """Write all that is generated below `root`. Returns the files, relative to it."""
    with tempfile.TemporaryDirectory() as home:
        # Neither a setting nor a .env of this machine may change a page.
        settings = {"NSA_HOME": home, "NSA_DATABASE_URL": f"sqlite:///{home}/nsa.db", "NSA_GATES": str(GATES)}
        os.environ.update(settings)
        upgrade(settings["NSA_DATABASE_URL"])
        with Store.open(settings["NSA_DATABASE_URL"]) as store:
            run_ids = _stored(store)
            runs = [run for run_id in run_ids if (run := queries.run(store, run_id)) is not None]
            written = [_write(root / DURATIONS, _durations(runs))]
            written += _reports(store, runs, root / PAGES)
            filled = tables.all_tables(store, runs)
            newest_first = list(reversed(run_ids))
            written += render_folder(store, ROOT / PAGES / "templates", newest_first, _ready_spec, root / PAGES)
        written.append(_write(root / PAGES / "decisions.md", _decisions()))
    for name in (PAGES / "README.md", Path("README.md")):
        written.append(_write(root / name, tables.fill((ROOT / name).read_text(), filled)))
    return [path.relative_to(root) for path in written]


def _stored(store: Store) -> list[str]:
    """Import the journals, and the figures of others for their columns in reports. Returns our runs, oldest first."""
    for table in (path for path in reference_data() if path.suffix == ".csv"):
        import_file(store, table)
    journals = sorted(DATA.glob(f"*{COMPRESSED}"))
    return [run_id for path in journals for run_id in import_file(store, path).run_ids]


def _reports(store: Store, runs: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the report of each page, with charts if its runs have curves. Returns its files."""
    written = []
    for name, own in tables.pages(runs).items():
        run_ids = [run["run_id"] for run in own]
        if name in CHARTED:
            written += write_report(store, run_ids, folder / name)
        else:
            written.append(_write(folder / name, report(store, run_ids)))
    return written


def _ready_spec(file: str, settings: Sequence[str]) -> Any:
    return load_spec(READY_SPECS / file, settings)


def _decisions() -> str:
    code, gate = _nsa("gate", "--gates", str(GATES))
    _, plan = _nsa("plan", "--gates", str(GATES))
    return DECISIONS.format(code=code, meaning=EXIT_CODES[code], gate=gate, plan=plan)


def _nsa(*command: str) -> tuple[int, str]:
    """Exit code and output of a command of `nsa`, on the database of the environment."""
    nsa = [sys.executable, "-c", "from orchestrator.cli.commands import main; main()"]
    done = subprocess.run([*nsa, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in EXIT_CODES:
        raise UserError(f"nsa {command[0]}: {done.stderr.strip()}")
    return done.returncode, "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def _durations(runs: list[dict[str, Any]]) -> str:
    """One row a complete run on GPUs that was not resumed: what predictions of minutes rest on."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["name", "kind", "spec_hash", "gpu", "gpus", "points", "minutes", "run_id", "commit"])
    for run in runs:
        took = tables.minutes(run)
        if run["state"] == "done" and run["gpu"] and took is not None:
            sizes = [run["gpu"], tables.gpus(run), run["points"], f"{took:.1f}"]
            rows.writerow([run["name"], run["kind"], run["spec_hash"], *sizes, run["run_id"], run["git_commit"]])
    return text.getvalue()


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


if __name__ == "__main__":
    main()
