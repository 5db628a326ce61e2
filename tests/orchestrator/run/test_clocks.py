"""Clocks that step back, or are behind on the host that resumes a run: the order of a run's states needs none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from jobs.schema.states import RunState
from orchestrator.store import Store
from orchestrator.store.models import Run
from orchestrator.store.records import Record, RunEndRecord

RUN = "20261120-120000-demo-abcd"
HOUR = timedelta(hours=1)


@pytest.fixture
def lived(sweep: Callable[..., list[Record]]) -> list[Record]:
    """A run that is cancelled, and resumed to its end on a host whose clock is an hour behind."""
    first, *points, end = sweep(RUN)
    assert isinstance(end, RunEndRecord)
    again = first.model_copy(update={"at": first.at - HOUR, "resumed": 1, "host": "bench2"})
    return [
        first,
        *points,
        end.model_copy(update={"state": RunState.CANCELLED, "resumed": 0}),
        again,
        end.model_copy(update={"at": end.at - HOUR, "resumed": 1}),
    ]


def of(store: Store) -> Run:
    with store.session() as session:
        return session.get_one(Run, RUN)


def test_a_run_is_alive_while_resumed_on_a_host_whose_clock_is_behind(store: Store, lived) -> None:
    for count in (-1, -2):  # its driver is alive, and its old journal is imported meanwhile
        store.apply_many(lived[:-1])
        run = of(store)
        assert (run.state, run.resumed, run.host, run.ended_at) == (RunState.RUNNING, 1, "bench2", None)
        store.apply_many(lived[:count])
    store.apply_many([lived[-1]])
    store.apply_many(lived[:-1])
    assert (of(store).state, of(store).created_at) == (RunState.DONE, lived[0].at)
