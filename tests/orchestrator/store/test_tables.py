"""Tables of reported figures, stored many rows at a time: the rows, the number of statements, the memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from sqlalchemy import create_engine, select, text
from statements import counted, received

import orchestrator
from orchestrator.errors import UserError
from orchestrator.store import Store, StoreError, StoreUnavailable, bulk, importer, queries, upgrade
from orchestrator.store.exporter import export
from orchestrator.store.importer import import_file
from orchestrator.store.models import Base
from orchestrator.store.records import OutcomeRecord, PointRecord

RUN = "20261120-120000-demo-abcd"
DATA = Path(orchestrator.__file__).parent / "reference_data"


def rows_of(store: Store) -> dict[str, list[str]]:
    with store.session() as session:
        tables = Base.metadata.sorted_tables
        found = {table.name: session.execute(select(table)).mappings().all() for table in tables}
    left_out = {"metric": {"id"}}  # counted by the database
    return {
        name: sorted(str({key: row[key] for key in row if key not in left_out.get(name, ())}) for row in rows)
        for name, rows in found.items()
    }


@pytest.mark.parametrize("name", ["seed_measurements.csv", "peers_h200.csv", "peer_stages_h200.csv"])
def test_a_table_gives_the_rows_of_its_records_one_by_one(store: Store, name: str, new_database):
    read, rows = importer._rows(DATA / name)
    with Store.open(new_database()) as other:
        for run in read(rows):
            other.apply_many([run.begin(), *chain.from_iterable(run.ended()), *run.events(), run.end()])
        expected = rows_of(other)
    import_file(store, DATA / name)
    assert rows_of(store) == expected
    assert expected["metric"]


def longer(path: Path, times: int) -> Path:
    """A table of peers, written to `path`, with so many times the rows of ours."""
    head, *lines = (DATA / "peers_h200.csv").read_text().splitlines(keepends=True)
    path.write_text(head + "".join(lines * times))
    return path


def test_a_table_is_stored_in_few_statements(store: Store, tmp_path: Path):
    """Not by one statement and more a row: a table of 95 MB has hundreds of thousands."""
    with counted(store.engine) as statements:
        summary = import_file(store, longer(tmp_path / "peers.csv", 10))
    assert summary.points > 700
    assert len(statements) < summary.points / 20
    assert queries.counts(store)["points_ok"] == summary.points


def test_the_number_of_statements_does_not_grow_with_the_rows(store: Store, tmp_path: Path):
    """Statements of one batch as the server sees them: a table of 95 MB took Postgres minutes by a statement a row."""
    count = received if store.engine.dialect.name == "postgresql" else counted
    found = []
    for times in (1, 2, 5):
        with count(store.engine) as statements:
            summary = import_file(store, longer(tmp_path / "peers.csv", times))
        found.append(len(statements))
        assert summary.points < bulk.ROWS
    assert found[1] == found[2] < 40, found  # the first replaces no older version


def test_a_row_that_is_there_twice_is_named_and_the_older_version_stays(store: Store, sweep, tmp_path: Path):
    path = tmp_path / "out.csv"
    store.apply_many(sweep(RUN))
    export(store, path, [RUN])
    import_file(store, path)
    before = rows_of(store)
    first, *lines = path.read_text().splitlines()
    path.write_text("\n".join([first, *lines, lines[3]]).replace("chunked", "packed"))
    with pytest.raises(
        UserError, match=rf"^out.csv line 34: metric: '[a-z_]+' is there twice for the point '{RUN}/0'; remove one"
    ):
        import_file(store, path)
    assert rows_of(store) == before


def ended(sweep, number: int) -> tuple[PointRecord, OutcomeRecord]:
    """The records of a point of a sweep."""
    of_point = [r for r in sweep(RUN) if getattr(r, "point_id", None) == f"{RUN}/{number}"]
    return next(r for r in of_point if r.type == "point"), next(r for r in of_point if r.type == "outcome")


def test_a_batch_that_the_database_refuses_leaves_nothing(store: Store, sweep):
    store.apply(sweep(RUN)[0])
    before = rows_of(store)
    plan, end = ended(sweep, 1)
    with (
        pytest.raises(StoreError, match="is there twice; give the journal as the run wrote it") as caught,
        store.session(writes=True) as session,
    ):
        bulk.add_points(session, [ended(sweep, 0), (plan.model_copy(update={"index": 0}), end)])
    assert "\n" not in str(caught.value)
    assert rows_of(store) == before


def test_a_value_that_no_driver_passes_on_is_told(store: Store, sweep):
    store.apply(sweep(RUN)[0])
    plan, end = ended(sweep, 0)
    naive = end.model_copy(update={"at": end.at.replace(tzinfo=None)})
    with (
        pytest.raises(StoreError, match=r"cannot hold a value .* has no time zone"),
        store.session(writes=True) as session,
    ):
        bulk.add_points(session, [(plan, naive)])


@pytest.mark.postgres
def test_a_server_that_goes_away_between_batches_is_told(postgres_url: str, sweep, monkeypatch: pytest.MonkeyPatch):
    upgrade(postgres_url)
    monkeypatch.setattr(bulk, "ROWS", 1)

    def points() -> Iterator[tuple[PointRecord, OutcomeRecord]]:
        yield ended(sweep, 0)
        end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in %'"
        with create_engine(postgres_url).connect() as connection:
            connection.execute(text(end))
        yield ended(sweep, 1)

    with Store.open(postgres_url) as store:
        store.apply(sweep(RUN)[0])
        with pytest.raises(StoreUnavailable), store.session(writes=True) as session:
            bulk.add_points(session, points())
        assert rows_of(store)["point"] == []


def test_a_table_beyond_the_memory_is_refused(sqlite_store: Store, tmp_path: Path):
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(importer.TABLE_LIMIT + 1)
    with pytest.raises(UserError, match="has more than 256 MiB; split it into one file a run"):
        import_file(sqlite_store, path)
