"""Files that a killed driver left: copied to the artifact store, and in no record. A resume records them."""

from __future__ import annotations

from collections import defaultdict

from jobs.schema.plain_text import in_a_line
from orchestrator.execute.artifacts import ArtifactError, ArtifactStore, Place
from orchestrator.run.plan import History
from orchestrator.store.records import ArtifactRecord, EventRecord, Record


def leftovers(history: History, store_url: str) -> list[Record]:
    """Records of the files in the store that a run's records lack, and a warning on each point that has any.

    Where the store cannot be read, a warning on the run: it goes on without.
    """
    run_id, store = history.run.run_id, ArtifactStore(store_url)
    try:
        unknown = [place for place in store.files(run_id) if place.path not in history.files]
    except ArtifactError as err:
        message = f"not looked for files that no record names: {in_a_line(err)}"
        return [EventRecord(run_id=run_id, level="warning", message=message)]
    of_point: dict[str, list[Place]] = defaultdict(list)
    for place in unknown:
        point = history.points.get(f"{run_id}/{place.point}")
        if point is not None and place.attempt <= point.attempt:
            of_point[f"{run_id}/{place.point}"].append(place)
    return [record for point_id, places in of_point.items() for record in _recorded(store, run_id, point_id, places)]


def _recorded(store: ArtifactStore, run_id: str, point_id: str, places: list[Place]) -> list[Record]:
    """Records of the files of a point, and what to tell of them."""
    found: list[Record] = []
    for place in places:
        try:
            file = store.describe(place)
        except ArtifactError as err:
            message = f"attempt {place.attempt}: file in no record, and it cannot be read: {in_a_line(err)}"
            found.append(EventRecord(run_id=run_id, point_id=point_id, level="warning", message=message))
            continue
        found.append(ArtifactRecord(run_id=run_id, point_id=point_id, attempt=place.attempt, artifact=file))
    recorded = [f"{r.artifact.name} (attempt {r.attempt})" for r in found if isinstance(r, ArtifactRecord)]
    if recorded:
        message = (
            f"the run's driver ended while files were kept: recorded now: {', '.join(recorded)}; others may be lost"
        )
        found.append(EventRecord(run_id=run_id, point_id=point_id, level="warning", message=message))
    return found
