"""Cancelling a run from outside its driver."""

from __future__ import annotations

from orchestrator.records import OutcomeRecord, RunEndRecord
from orchestrator.settings import Settings
from orchestrator.states import PointState, RunState
from orchestrator.store import Store, queries
from orchestrator.submission import SubmissionError, stop


def cancel_run(settings: Settings, store: Store, run_id: str) -> str:
    """Stop the run's Ray job; where the driver is gone already, mark what it left unfinished as cancelled.

    Returns a line that says what was done.
    """
    run = queries.run(store, run_id)
    assert run is not None, "the caller looked the run up"
    if run["state"] not in (RunState.PENDING, RunState.RUNNING):
        return f"{run_id} has ended already: {run['state']}"
    job = run["submission_id"]
    try:
        if job and stop(settings, str(job)):
            return f"stopping {run_id} (job {job}); its remaining points end as cancelled"
    except SubmissionError as err:
        gone = f"the cluster no longer knows its job ({err})"
    else:
        gone = "its job has ended" if job else "it was not run as a Ray job (interrupt it with Ctrl-C if it still runs)"
    left = _mark_cancelled(store, run_id)
    return f"{gone}; marked {left} unfinished points of {run_id} as cancelled"


def _mark_cancelled(store: Store, run_id: str) -> int:
    reason = "cancelled by nsa cancel"
    records = [
        OutcomeRecord(
            run_id=run_id, point_id=p["point_id"], attempt=max(1, int(p["attempt"] or 0)), state=PointState.CANCELLED,
            reason=reason,
        )
        for p in queries.points(store, run_id).to_dict("records")
        if not PointState(p["state"]).ended
    ]  # fmt: skip
    store.apply_many([*records, RunEndRecord(run_id=run_id, state=RunState.CANCELLED, reason=reason)])
    return len(records)
