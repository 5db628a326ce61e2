"""Journal, rows and checkpoints of the only run of a home."""

from pathlib import Path
from typing import Any

import pandas as pd

from orchestrator.store import Store, journal, queries


def journal_of(home: Path) -> Path:
    """The journal, in the run's folder."""
    [path] = (home / "artifacts").glob(f"*/{journal.NAME}")
    return path


def records(home: Path) -> list[Any]:
    """The records of the journal."""
    return list(journal.read(journal_of(home)))


def stored(home: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The run and its points, as the database has them."""
    run_id = journal_of(home).parent.name
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False) as store:
        return queries.run(store, run_id) or {}, queries.points(store, run_id)


def newest_checkpoint(home: Path) -> int:
    """Step of the newest complete checkpoint of the first point; 0 without one."""
    found = home.glob("artifacts/*/0000/checkpoints/*-step-*/complete.json")
    return max((int(path.parent.name.rpartition("-")[2]) for path in found), default=0)
