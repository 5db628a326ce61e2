"""Rows of a database, and what a resume makes of a journal."""

from typing import Any

import pandas as pd
from sqlalchemy import select

from orchestrator.run.plan import History
from orchestrator.store import Store
from orchestrator.store.models import Base
from orchestrator.store.views import v_gate


def rows_of(store: Store) -> dict[str, list[str]]:
    """Sorted rows of every table but the verdicts, without the numbers that a database gives to rows."""
    tables = [table for table in Base.metadata.sorted_tables if table.name != "verdict"]
    with store.session() as session:
        return {
            table.name: sorted(
                str({name: value for name, value in row.items() if (table.name, name) not in _COUNTED})
                for row in session.execute(select(table)).mappings()
            )
            for table in tables
        }


def verdicts_of(store: Store, run_id: str | None = None) -> pd.DataFrame:
    """The view v_gate: the newest verdicts on a run, or (None) on the whole store."""
    query = select(v_gate).where(v_gate.c.run_id == run_id).order_by(v_gate.c.target, v_gate.c.position)
    with store.session() as session:
        return pd.DataFrame(session.execute(query).mappings().all())


_COUNTED = {("metric", "id"), ("artifact", "id")}


def attempts_of(history: History) -> dict[str, Any]:
    """Basis of a resume: each point's attempts, and the figures of its outcome."""
    attempts = {
        point_id: {number: (one.state, one.settled, one.key) for number, one in point.attempts.items()}
        for point_id, point in history.points.items()
    }
    return {**attempts, "metrics": history.metrics}
