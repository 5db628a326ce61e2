"""Points supervised as a run does it, with the files that were kept of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.schema.point import Point
from orchestrator.execute.supervisor import supervise
from orchestrator.messages import Assignment, Conditions
from orchestrator.store.records import ArtifactRecord, OutcomeRecord


@dataclass(frozen=True)
class Ended:
    """An outcome and the files that were kept of it: name -> text in the store."""

    outcome: OutcomeRecord
    files: dict[str, str]


def supervised(points: Sequence[Point], conditions: Conditions, store: Path, **options: Any) -> list[Any]:
    """All updates of points "r/0", "r/1", ..., with each outcome as Ended; files are kept in the folder `store`."""
    assignments = [Assignment("r", f"r/{number}", 1, point) for number, point in enumerate(points)]
    updates = list(supervise(assignments, replace(conditions, store=f"file://{store}"), **options))

    def read(outcome: OutcomeRecord) -> Ended:
        kept = [u.artifact for u in updates if isinstance(u, ArtifactRecord) and u.point_id == outcome.point_id]
        return Ended(outcome, {file.name: (store / file.path).read_text() for file in kept})

    return [read(update) if isinstance(update, OutcomeRecord) else update for update in updates]
