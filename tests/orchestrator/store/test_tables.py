"""Tables of reported figures, stored many rows at a time: the rows, the number of statements, the memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from sqlalchemy import select
from statements import counted

import orchestrator
from orchestrator.errors import UserError
from orchestrator.store import Store, importer, queries
from orchestrator.store.exporter import export
from orchestrator.store.importer import import_file
from orchestrator.store.models import Base

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


def test_a_table_beyond_the_memory_is_refused(sqlite_store: Store, tmp_path: Path):
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(importer.TABLE_LIMIT + 1)
    with pytest.raises(UserError, match="has more than 256 MiB; split it into one file a run"):
        import_file(sqlite_store, path)
