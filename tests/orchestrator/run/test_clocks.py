"""Clocks that step back, or are behind on the host that resumes a run: the order of a run's states needs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from sqlalchemy import select

from jobs.schema.states import PointState, RunState
from orchestrator.run import plan
from orchestrator.store import Store, exporter, queries
from orchestrator.store.models import Base, Run
from orchestrator.store.records import OutcomeRecord, PointRecord, Record, RunEndRecord

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


@pytest.fixture
def other(new_database: Callable[[], str], store: Store) -> Iterator[Store]:
    with Store.open(new_database()) as opened:
        yield opened


def of(store: Store) -> Run:
    with store.session() as session:
        return session.get_one(Run, RUN)


def rows(store: Store) -> list[str]:
    with store.session() as session:
        tables = (Base.metadata.tables[name] for name in ("run", "point", "attempt"))
        return [
            repr(row) for table in tables for row in session.execute(select(table).order_by(*table.primary_key)).all()
        ]


def test_a_run_ends_although_the_clock_has_stepped_back(store: Store, sweep) -> None:
    first, *_, end = sweep(RUN)
    store.apply(first)
    store.apply(end.model_copy(update={"at": first.at - HOUR, "resumed": 0}))
    assert (of(store).state, of(store).ended_at) == (RunState.DONE, first.at - HOUR)
    store.apply(first)
    assert of(store).state is RunState.DONE


def test_a_run_is_alive_while_resumed_on_a_host_whose_clock_is_behind(store: Store, lived) -> None:
    for count in (-1, -2):  # its driver is alive, and its old journal is imported meanwhile
        store.apply_many(lived[:-1])
        run = of(store)
        assert (run.state, run.resumed, run.host, run.ended_at) == (RunState.RUNNING, 1, "bench2", None)
        store.apply_many(lived[:count])
    store.apply(lived[-1])
    store.apply_many(lived[:-1])
    assert (of(store).state, of(store).created_at) == (RunState.DONE, lived[0].at)


def test_its_journal_can_be_imported_whole_and_in_part(store: Store, lived) -> None:
    store.apply_many(lived)
    before = rows(store)
    assert (of(store).state, of(store).resumed, of(store).created_at) == (RunState.DONE, 1, lived[0].at)
    for part in (lived, lived[:1], lived[:-2], lived[:-1], lived[-2:], lived):
        store.apply_many(part)
        assert rows(store) == before


@pytest.mark.parametrize("count", [-1, None])
def test_its_journal_is_rebuilt(store: Store, other: Store, lived, count: int | None) -> None:
    store.apply_many(lived[:count])
    other.apply_many(exporter.records(store, RUN))
    assert rows(other) == rows(store)
    other.apply_many(lived[:count])
    assert rows(other) == rows(store)


class TestAPointWithoutAnAttempt:
    """Planned, skipped and cancelled in turn, each resumption on a host whose clock is a further hour behind."""

    @pytest.fixture(params=[0, 1], ids=["never handed out", "lost once"])
    def lived(self, request: pytest.FixtureRequest, sweep) -> list[Record]:
        first, planned, *_, end = sweep(RUN)
        assert isinstance(planned, PointRecord)
        attempt, of_it = request.param, {"run_id": RUN, "point_id": planned.point_id}
        found: list[Record] = [first, planned.model_copy(update={"resumed": 0})]
        if attempt:
            found.append(OutcomeRecord(**of_it, at=planned.at, attempt=1, state=PointState.LOST, reason="node gone"))
        for resumed in range(1, 6):
            behind = {"at": first.at - resumed * HOUR, "resumed": resumed}
            state = PointState.SKIPPED if resumed in (2, 4) else PointState.PENDING
            plans = {"state": state, "attempt": attempt, "key": f"key {resumed}"}
            found += [first.model_copy(update=behind), planned.model_copy(update=behind | plans)]
            attempt += state is PointState.SKIPPED
            if resumed == 3:
                behind["at"] -= HOUR
                attempt += 1
                cancelled = {"at": behind["at"], "attempt": attempt, "state": PointState.CANCELLED}
                found.append(OutcomeRecord.model_validate(of_it | cancelled))
                found.append(end.model_copy(update=behind | {"state": RunState.CANCELLED}))
        return found

    def test_its_state_follows_its_resumptions(self, store: Store, lived) -> None:
        for count, record in enumerate(lived, 1):
            store.apply(record)
            known = plan.history(lived[:count])
            if known is None or not known.points:
                continue
            [point] = known.points.values()
            [row] = queries.points(store, RUN).to_dict("records")
            assert (row["state"], row["again"] or row["state"]) == (point.state, point.latest), record
            assert row["key"] == point.key, record

    def test_its_journal_is_rebuilt(self, store: Store, other: Store, lived) -> None:
        for record in lived:
            store.apply(record)
            with other.session(writes=True) as session:
                session.connection().exec_driver_sql("DELETE FROM run")
            other.apply_many(exporter.records(store, RUN))
            assert rows(other) == rows(store)
