"""The store on SQLite and on a real Postgres: idempotent writes, states, migrations and errors."""

import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import insert, select, text, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.schema import CreateTable
from statements import rows_of

from jobs.schema.states import FAILED, PointState, RunState
from orchestrator.store import Store, StoreError, exporter, queries, upgrade
from orchestrator.store.engine import REVISIONS
from orchestrator.store.models import Attempt, Base, Metric, Run
from orchestrator.store.records import (
    LabelRecord,
    MetricData,
    OutcomeRecord,
    PointRecord,
    Progress,
    Record,
    RunEndRecord,
    SeriesRecord,
    StartRecord,
)
from orchestrator.store.views import QUERIES

RUN = "20261120-120000-demo-abcd"


def point_of(store: Store, number: int = 0) -> dict[str, Any]:
    return queries.points(store, RUN).to_dict("records")[number]


def metrics_of(store: Store, number: int = 0) -> dict[str, float]:
    """The metrics of the attempt that counts."""
    frame = queries.metrics(store, f"{RUN}/{number}")
    return dict(zip(frame["name"], frame["value"], strict=True))


def outcome(at, attempt=1, state=PointState.OK, time=None, **more) -> OutcomeRecord:
    metrics = (MetricData(name="time", unit="ms", value=time),) if time is not None else ()
    return OutcomeRecord(run_id=RUN, point_id=f"{RUN}/0", at=at, attempt=attempt, state=state, metrics=metrics, **more)


def test_a_change_of_the_tables_has_a_migration():
    """Set the digest to that of the new tables once a file in migrations/versions makes them of the older ones."""
    tables = [str(CreateTable(table).compile(dialect=sqlite.dialect())) for table in Base.metadata.sorted_tables]
    digest = hashlib.sha256("".join(tables).encode()).hexdigest()[:12]
    assert (REVISIONS[-1], digest) == ("0003", "12efe16685fd")


@pytest.mark.parametrize(
    ("kind", "config", "answers"),
    [
        ("scaling", {}, ()),
        ("capacity", {}, {PointState.OOM}),
        ("backward", {"search": "x"}, FAILED - {PointState.LOST}),
        ("backward", {"search": None}, ()),
    ],
)
def test_an_older_database_is_migrated(store: Store, database_url: str, sweep, kind, config, answers):
    """The failures that answer a search are those that its kind plans points with."""
    begun, *others = sweep()
    planned = {"config": config, "answers": tuple(sorted(answers))}
    others = [each.model_copy(update=planned) if isinstance(each, PointRecord) else each for each in others]
    store.apply_many([begun.model_copy(update={"kind": kind}), *others])
    before = rows_of(store)
    with store.session(writes=True) as session:
        for name in reversed(QUERIES):
            session.execute(text(f"DROP VIEW {name}"))
        for column in ("run.person", "run.tags", "run.notes", "run.labelled_at", "point.answers"):
            session.execute(text("ALTER TABLE {} DROP COLUMN {}".format(*column.split("."))))
        session.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    assert upgrade(database_url) == ("0001", "0003")
    with Store.open(database_url) as migrated:
        assert rows_of(migrated) == before
        assert queries.runs(migrated)["tags"].tolist() == [""]


def test_a_run_is_alive_while_resumed_on_a_host_whose_clock_is_an_hour_behind(store: Store, sweep) -> None:
    first, *points, end = sweep(RUN)
    hour = timedelta(hours=1)
    lived = [first, *points, end.model_copy(update={"state": RunState.CANCELLED})]
    lived.append(first.model_copy(update={"at": first.at - hour, "resumed": 1, "host": "bench2"}))
    lived.append(end.model_copy(update={"at": end.at - hour, "resumed": 1}))

    def run() -> Run:
        with store.session() as session:
            return session.get_one(Run, RUN)

    for count in (-1, -2):  # its driver is alive, and its old journal is imported meanwhile
        store.apply_many(lived[:-1])
        assert (run().state, run().resumed, run().host, run().ended_at) == (RunState.RUNNING, 1, "bench2", None)
        store.apply_many(lived[:count])
    store.apply_many([lived[-1]])
    store.apply_many(lived[:-1])
    assert (run().state, run().created_at) == (RunState.DONE, first.at)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (StartRecord(run_id=RUN, point_id=f"{RUN}/99", attempt=1), "point: '.*/99' is not in the database; import"),
        (StartRecord(run_id="x", point_id="x/0", attempt=1), "run: 'x' is not in the database; import the whole"),
        (RunEndRecord(run_id="x", state=RunState.DONE), "run: 'x' is not in the database; import the whole"),
    ],
)
def test_one_wrong_record_rolls_back_its_batch(store: Store, sweep, wrong: Record, message: str):
    with pytest.raises(StoreError, match=message):
        store.apply_many([*sweep()[:3], wrong])
    assert rows_of(store)["run"] == []


def test_replaying_a_journal_gives_the_same_rows(store: Store, sweep):
    records = sweep(failures={PointState.CRASH: "signal 9", PointState.SKIPPED: "needs 93 GiB"})
    for record in records:
        store.apply_many([record])
    before = rows_of(store)
    store.apply_many(records)
    for _ in range(5):
        first = random.Random(_).randrange(len(records))
        store.apply_many(records[first:])
        store.apply_many(records[:first])
    store.apply_many(reversed(records[1:]))
    assert rows_of(store) == before


def test_a_point_that_is_planned_again_keeps_its_old_numbers_until_it_has_new_ones(store: Store, sweep):
    """Metrics of other code stay under the key and attempt that they were measured with, never under the new key."""
    records = sweep()
    store.apply_many(records)
    late = records[-1].at + timedelta(hours=1)
    again = [
        records[0].model_copy(update={"at": late, "resumed": 1, "git_commit": "d" * 40}),
        records[1].model_copy(update={"at": late, "attempt": 1, "resumed": 1, "key": "other code"}),
    ]
    store.apply_many(again)
    old = metrics_of(store)
    assert old
    for newest, record in [
        (("pending", 0), again[1]),
        (("running", 2), StartRecord(run_id=RUN, point_id=f"{RUN}/0", at=late, attempt=2, node="node-2")),
        (("lost", 0), outcome(late, attempt=2, state=PointState.LOST, reason="node gone")),
        (("running", 3), StartRecord(run_id=RUN, point_id=f"{RUN}/0", at=late, attempt=3, node="node-2")),
        (("crash", 0), outcome(late, attempt=3, state=PointState.CRASH, final=False)),
        (("running", 4), StartRecord(run_id=RUN, point_id=f"{RUN}/0", at=late, attempt=4, node="node-3")),
    ]:
        store.apply_many([record])
        point = point_of(store)
        assert (point["state"], point["key"], point["attempt"]) == ("ok", records[1].key, 1)
        assert (point["node"], point["route"], metrics_of(store)) == ("bench1", records[3].route, old)
        assert (point["again"], point["running"]) == newest
        before = rows_of(store)
        store.apply_many([*records[2:], *again])  # replaying changes nothing
        assert rows_of(store) == before
    store.beat(Progress(RUN, f"{RUN}/0", late, "time", 3, 10))
    point = point_of(store)
    assert (point["state"], point["phase"], point["done"], point["running_on"]) == ("ok", "time", 3, "node-3")
    store.apply_many([outcome(late + timedelta(seconds=9), attempt=4, time=7.0)])
    store.apply_many([*records, *again])
    point = point_of(store)
    assert (point["state"], point["key"], point["attempt"], point["node"]) == ("ok", "other code", 4, "node-3")
    assert (metrics_of(store), point["again"]) == ({"time": 7.0}, None)
    with store.session() as session:
        commits = select(Attempt.git_commit).where(Attempt.point_id == f"{RUN}/0").order_by(Attempt.number)
        assert [str(commit)[0] for commit in session.scalars(commits)] == ["c", "d", "d", "d"]


def test_a_failed_point_cannot_carry_numbers(sweep):
    with pytest.raises(ValidationError, match="only 'ok' may carry metrics"):
        outcome(sweep()[-1].at, state=PointState.OOM, time=1.0)
    with pytest.raises(ValidationError, match="finite number"):
        outcome(sweep()[-1].at, time=float("nan"))


def test_the_database_itself_refuses_numbers_of_a_failed_point(store: Store, sweep):
    records = sweep(failures={PointState.OOM: "out of memory"})
    store.apply_many(records)
    row = {
        "point_id": f"{RUN}/8",
        "attempt": 1,
        "name": "time",
        "unit": "ms",
        "value": 0.0,
        "samples": [],
        "method": "",
    }
    moved = update(Attempt).where(Attempt.point_id == f"{RUN}/0").values(state=PointState.HANG)
    for statement in (insert(Metric).values(row), insert(Metric).values(**row, state="oom"), moved):
        with store.engine.connect() as connection, pytest.raises(IntegrityError):
            connection.execute(statement)


def test_beats_show_progress_of_a_running_point_only(store: Store, sweep):
    records = sweep()
    store.apply_many(records[:3])
    late = records[-1].at
    store.beat(Progress(RUN, f"{RUN}/0", late, "timing", 3, 20))
    point = point_of(store)
    assert (point["phase"], point["done"], point["total"], point["heartbeat_at"]) == ("timing", 3, 20, late)
    store.apply_many([records[3]])
    store.beat(Progress(RUN, f"{RUN}/0", late + timedelta(1), "too late", 4, 20))
    assert point_of(store)["phase"] == "timing"


def test_a_reader_and_a_writer_do_not_wait_for_each_other(store: Store, database_url: str, sweep, monkeypatch):
    monkeypatch.setattr("orchestrator.store.engine.TIMEOUT_S", 0.1)
    store.apply_many(sweep())
    with Store.open(database_url) as writer, Store.open(database_url, readonly=True) as reader:
        with reader.session() as session:
            assert session.scalars(select(Run.id)).all() == [RUN]
            writer.apply_many(sweep(run_id="another"))
        assert queries.counts(reader)["runs"] == 2
        with writer.session(writes=True) as session:
            session.execute(update(Attempt).values(reason="in the middle"))
            with reader.session() as other:
                assert set(other.scalars(select(Attempt.reason))) == {None}


def test_threads_can_write_at_the_same_time(store: Store, sweep):
    store.apply_many(sweep())
    late = sweep()[-1].at
    with ThreadPoolExecutor(6) as threads:
        for n in range(2, 8):
            threads.submit(store.apply_many, [outcome(late + timedelta(seconds=n), attempt=n, time=float(n))])
    assert metrics_of(store) == {"time": 7.0}


def test_a_readonly_store_cannot_write(store: Store, database_url: str, sweep):
    with Store.open(database_url, readonly=True) as reader:
        with pytest.raises(StoreError, match="reading only"):
            reader.apply_many(sweep())
        with pytest.raises(StoreError), reader.session() as session:
            session.execute(text("DELETE FROM run"))


def test_postgres_is_migrated_only_when_asked(postgres_url: str):
    with pytest.raises(StoreError, match="holds no tables yet; run `nsa db upgrade`"):
        Store.open(postgres_url)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "ALTER TABLE attempt RENAME TO remeasurement",
            "0003 of a version before 0.2.0, .* it: nsa import JOURNAL...$",
        ),
        ("UPDATE alembic_version SET version_num = '9999'", "9999 of a newer version; update nsa-bench here$"),
    ],
)
def test_other_schema_versions_are_refused_in_a_line(store: Store, database_url: str, change: str, message: str):
    with store.session(writes=True) as session:
        session.execute(text(change))
    for attempt in (upgrade, Store.open, partial(Store.open, create=False)):
        with pytest.raises(StoreError, match=message) as caught:
            attempt(database_url)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("axis", "value"), [("batch", 0), ("seq_len", 2**70), ("seq_len", "abc"), ("env", "x" * 401)])
def test_a_coordinate_that_would_break_views_and_fits_is_refused(store: Store, sweep, axis: str, value: object):
    records = sweep()
    records[1] = records[1].model_copy(update={"axes": records[1].axes | {axis: value}})
    with pytest.raises(StoreError, match=rf"^point '.*/0': Axes\.{axis}: .*: use ") as caught:
        store.apply_many(records)
    assert "\n" not in str(caught.value)
    assert queries.counts(store)["runs"] == 0


def test_the_latest_labels_of_a_run_count_whichever_comes_first(store: Store, sweep):
    records = sweep()
    old, new = (
        LabelRecord(run_id=RUN, at=records[0].at + timedelta(hours=n), tags=tags, notes=note)
        for n, tags, note in ((1, ("slow",), None), (2, ("tuned", "baseline"), "with exact slots"))
    )
    for labels in ((new, old), (old, new)):
        store.apply_many([*records, *labels])
        [run] = queries.runs(store, tag="baseline").to_dict("records")
        assert (run["tags"], run["notes"]) == ("baseline tuned", "with exact slots")
    assert queries.runs(store, tag="base").empty
    assert queries.runs(store, text="exact slots")["run_id"].tolist() == [RUN]


T0 = datetime(2026, 11, 20, 12, tzinfo=UTC)
HUNG = f"{RUN}/8"


def piece(first: int, count: int, **changes: Any) -> SeriesRecord:
    steps = tuple(range(first, first + count))
    told: dict[str, Any] = {
        "run_id": RUN, "at": T0, "point_id": HUNG, "attempt": 1, "rank": 0, "name": "loss", "unit": "nat/byte",
        "steps": steps, "times": tuple(T0.timestamp() + 0.125 * step for step in steps),
        "values": tuple(2.0 / (1 + step) for step in steps),
    }  # fmt: skip
    return SeriesRecord.model_validate(told | changes)


def rows(store: Store) -> list[tuple]:
    with store.session() as session:
        query = "SELECT point_id, attempt, latest, series, unit, rank, step, value FROM v_series ORDER BY 1, 2, 4, 6, 7"
        return [tuple(row) for row in session.execute(text(query))]


@pytest.fixture
def failed(store: Store, sweep) -> Store:
    store.apply_many(sweep(RUN, failures={PointState.HANG: "silent"}))
    return store


def test_a_replay_adds_nothing_and_a_failed_point_keeps_its_series(failed: Store) -> None:
    pieces: list[Record] = [piece(0, 3), piece(3, 2), piece(0, 2, rank=1)]
    failed.apply_many(pieces)
    once = rows(failed)
    assert [row[3:] for row in once] == [
        *[("loss", "nat/byte", 0, step, 2.0 / (1 + step)) for step in range(5)],
        *[("loss", "nat/byte", 1, step, 2.0 / (1 + step)) for step in range(2)],
    ]
    failed.apply_many([*pieces, piece(1, 3)])
    assert rows(failed) == once
    with failed.session() as session:
        assert session.execute(text("SELECT state FROM v_points WHERE point_id = :p"), {"p": HUNG}).scalar() == "hang"


def test_steps_that_are_done_again_have_their_latest_samples_which_come_last(failed: Store) -> None:
    """After a restart from a checkpoint: they are live, and the steps that are still ahead are the past."""
    before = piece(0, 8)
    again = piece(3, 2, times=(T0.timestamp() + 60, T0.timestamp() + 61), values=(7.0, 8.0))
    for told in ([before, again, before], [again]):  # a replay brings nothing back
        failed.apply_many(told)
        found = queries.series(failed, HUNG, attempt=1)
        assert found["step"].tolist() == [0, 1, 2, 5, 6, 7, 3, 4]
        assert found["value"].tolist()[-2:] == [7.0, 8.0]
        [exported] = json.loads(exporter.to_json(failed, [RUN]))[0]["points"][8]["series"]
        assert exported["steps"] == found["step"].tolist()
        assert exported["values"] == found["value"].tolist()
        assert exported["times"] == [at.isoformat() for at in found["at"]]
    assert queries.series(failed, HUNG, attempt=1, most=3)["step"].tolist()[-1] == 4


def test_a_read_can_be_thinned_to_samples_evenly_spaced_with_the_last(failed: Store) -> None:
    failed.apply_many([piece(0, 1000), piece(0, 7, rank=1)])
    frame = queries.series(failed, HUNG, attempt=1, most=100)
    many = frame.loc[frame["rank"] == 0, "step"].tolist()
    assert many == [*range(0, 1000, 10), 999]
    assert frame.loc[frame["rank"] == 1, "step"].tolist() == list(range(7))
    assert frame["at"].iloc[1] == T0 + timedelta(seconds=1.25)
