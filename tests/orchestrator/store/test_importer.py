"""Import and export of tables, journals and our own CSV: no duplicates, no invented values, the same rows elsewhere."""

import csv
import gzip
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from statements import attempts_of, rows_of

import orchestrator
from jobs.schema.axes import Axis
from jobs.schema.quantities import TIME, Quantity
from jobs.schema.states import PointState, RunState
from orchestrator.errors import UserError
from orchestrator.run import plan
from orchestrator.store import Store, exporter, journal, queries
from orchestrator.store.exporter import export
from orchestrator.store.importer import import_file
from orchestrator.store.journal import Journal
from orchestrator.store.records import (
    RECORD,
    ArtifactData,
    ArtifactRecord,
    EventRecord,
    LabelRecord,
    OutcomeRecord,
    PointRecord,
    Record,
    RunEndRecord,
    SeriesRecord,
    StartRecord,
)

DATA = Path(orchestrator.__file__).parent / "reference_data"
RUN = "20261120-120000-demo-abcd"
FILE = {"name": "a.txt", "path": f"{RUN}/0001/1/a.txt", "size": 1, "sha256": "0", "content": "text"}


def test_reference_tables_import_once(store: Store):
    files = sorted(DATA.glob("*.csv"))
    assert len(files) == 3
    for path in files:
        assert "nothing changed" not in import_file(store, path)
    before = rows_of(store)
    for path in files:
        assert "nothing changed" in import_file(store, path)
    assert rows_of(store) == before
    assert set(queries.runs(store).origin) == {"reported"}
    counted = queries.counts(store)
    assert (counted["runs"], counted["points_hang"], counted["points_timeout"]) == (6, 6, 2)


def test_every_seed_figure_is_kept_and_nothing_else(sqlite_store: Store):
    import_file(sqlite_store, DATA / "seed_measurements.csv")
    rows = pd.read_csv(DATA / "seed_measurements.csv")
    stored = queries.measurements(sqlite_store)
    assert sorted(stored.value) == pytest.approx(sorted(rows.value.dropna()))
    curve = stored[(stored.implementation == "nsa-vibe") & (stored.run_id.str.contains("002")) & (stored.unit == "MiB")]
    assert curve.sort_values("seq_len").value.tolist() == [483, 1425, 5164.5, 5164.5, 12019.8, 12019.8, 20556.9]
    assert set(curve.metric) == {"peak_memory"}
    assert set(curve.head_dim) == {64}
    assert curve.sort_values("seq_len").estimate_bytes.iloc[0] == 229 * 2**20


def test_a_changed_table_replaces_its_older_version(sqlite_store: Store, tmp_path: Path):
    path = tmp_path / "peers.csv"
    lines = (DATA / "peers_h200.csv").read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]))
    import_file(sqlite_store, path)
    path.write_text("".join(lines[:2]).replace("4.651", "4.7"))
    assert "nothing changed" not in import_file(sqlite_store, path)
    assert queries.scaling(sqlite_store).value.tolist() == [1.095, 1672.0, 4.7]


def written(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(RECORD.dump_json(record).decode() + "\n" for record in records))
    return path


def refused(store: Store, path: Path) -> str:
    """The line by which a wrong file is refused, which changes nothing."""
    before = rows_of(store)
    with pytest.raises(UserError) as caught:
        import_file(store, path)
    assert "\n" not in str(caught.value)
    assert rows_of(store) == before
    return str(caught.value)


@pytest.mark.parametrize("name", ["journal.jsonl", "run.jsonl.gz"])
def test_a_journal_is_imported_without_its_torn_last_line(store: Store, sweep, tmp_path: Path, name: str):
    path = written(tmp_path / "whole.jsonl", sweep())
    torn = path.read_bytes() + b'{"v":1,"type":"ev'
    (tmp_path / name).write_bytes(gzip.compress(torn) if name.endswith(".gz") else torn)
    assert import_file(store, tmp_path / name).endswith(f"{name}: 1 measured run(s), 8 points, 32 metrics")
    before = rows_of(store)
    import_file(store, path)
    assert rows_of(store) == before
    assert queries.runs(store).state.tolist() == ["done"]


def test_a_table_that_was_cut_off_replaces_nothing(sqlite_store: Store, tmp_path: Path):
    whole = (DATA / "peers_h200.csv").read_bytes()
    path = tmp_path / "peers_h200.csv"
    path.write_bytes(whole.rstrip())  # without the last line's end it is whole all the same
    import_file(sqlite_store, path)
    path.write_bytes(whole[: whole.rindex(b",", 0, 3000) - 1])
    assert re.search(r"'peers_h200.csv' ends in line \d+, in the cell \d+ of 15; give", refused(sqlite_store, path))


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-20], lambda b: b[:40] + b"\0" * 8 + b[48:], lambda _: b"{}\n"],
    ids=["cut", "bits", "plain"],
)
def test_a_damaged_compressed_journal_is_refused_in_one_line(sqlite_store: Store, sweep, tmp_path: Path, damage):
    plain = written(tmp_path / "journal.jsonl", sweep())
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(damage(gzip.compress(plain.read_bytes())))
    said = refused(sqlite_store, path)
    assert re.search(r"run\.jsonl\.gz': is not whole gzip \(.+\); compress the journal again", said)


def test_a_journal_with_another_runs_records_steals_no_point(store: Store, sweep, tmp_path: Path):
    """Behind a beginning of its own it ends a point of a run that the database has."""
    store.apply_many(sweep())
    own, theirs = sweep("thief")[0], sweep()[-4]
    path = written(tmp_path / "journal.jsonl", [own, theirs.model_copy(update={"at": datetime.now(UTC), "attempt": 9})])
    assert re.search(f"line 2 is of '{RUN}/.*', in the journal of 'thief'", refused(store, path))


@pytest.mark.parametrize("change", [{"kind": "train"}, {"name": "other"}, {"at": datetime(2020, 1, 1, tzinfo=UTC)}])
def test_a_journal_of_another_run_with_the_same_id_changes_nothing(store: Store, sweep, tmp_path: Path, change: dict):
    store.apply_many(sweep())
    first, *rest = sweep(laws={"dense": 2.0})
    path = written(tmp_path / "journal.jsonl", [first.model_copy(update=change), *rest])
    assert re.search(rf"is of another run than the '{RUN}' in .*use another database", refused(store, path))


@pytest.mark.parametrize("number", [0, -1])
def test_a_run_of_the_future_is_not_the_newest_for_ever(sqlite_store: Store, sweep, tmp_path: Path, number: int):
    records = sweep()

    def ahead(**by: int) -> Path:
        changed = list(records)
        changed[number] = records[number].model_copy(update={"at": datetime.now(UTC) + timedelta(**by)})
        return written(tmp_path / "journal.jsonl", changed)

    for by in ({"days": 40_000}, {"hours": 23}, {"minutes": 12}):
        assert " UTC, in the future; set the clock of its host" in refused(sqlite_store, ahead(**by))
    assert "1 measured run" in import_file(sqlite_store, ahead(minutes=5))


def test_an_export_is_imported_as_reported(store: Store, sweep, tmp_path: Path):
    store.apply_many(sweep(failures={PointState.OOM: "out of memory", PointState.SKIPPED: "needs 93 GiB"}))
    path = tmp_path / "out.csv"
    assert "10 points" in str(export(store, path, [RUN]))
    import_file(store, path)
    import_file(store, path)
    mine, theirs = (rows for _, rows in queries.measurements(store).groupby("origin"))
    assert set(theirs.run_id) == {f"imported-{RUN}"}
    assert theirs.value.tolist() == pytest.approx(mine.value.tolist())
    states = queries.states(store, run_ids=[f"imported-{RUN}"])
    assert states.state.tolist() == ["ok"] * 8 + ["oom", "skipped"]
    assert states.reason.tolist()[-2:] == ["out of memory", "needs 93 GiB"]


@pytest.mark.parametrize(
    "text", ["=1+1", "'=1", "@x", "-5", "+1", "\tx", "\rx", "two\nlines\r\nof text", 'a "quoted", one']
)
def test_no_cell_of_an_export_is_computed_and_each_text_comes_back(sqlite_store: Store, sweep, tmp_path: Path, text):
    records = [r.model_copy(update={"label": text} if r.type == "point" else {}) for r in sweep()]
    sqlite_store.apply_many(records)
    path = tmp_path / "out.csv"
    export(sqlite_store, path, [RUN])
    with path.open(newline="") as file:
        assert not {row["label"][0] for row in csv.DictReader(file)} & set("=+-@\t\r")
    import_file(sqlite_store, path)
    assert set(queries.states(sqlite_store, run_ids=[f"imported-{RUN}"])["label"]) == {text}


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (0, {"at": "2026-11-20T12:00:00"}),
        (0, {"at": "0001-01-01T00:00:00+14:00"}),
        (1, {"attempt": 2**63}),
        (1, {"key": "k" * 6000}),
        (1, {"axes": {"image": {"a": 1}}}),
        (4, {"artifact": FILE | {"size": 1 << 63}}),
        (4, {"artifact": FILE | {"name": "n" * 201}}),
    ],
)
def test_a_journal_with_what_no_database_holds_is_refused_in_a_line(
    sqlite_store: Store, sweep, tmp_path: Path, record, change
):
    lines = [json.loads(RECORD.dump_json(each)) for each in sweep()]
    lines[record] |= change
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(sqlite_store, path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.csv"])
@pytest.mark.parametrize("make", [os.mkfifo, partial(os.symlink, "/dev/zero")], ids=["pipe", "device"])
def test_what_is_no_file_is_not_read(sqlite_store: Store, tmp_path: Path, name: str, make: Callable[[Path], None]):
    make(tmp_path / name)
    assert refused(sqlite_store, tmp_path / name).endswith("is no file; give a journal (.jsonl, .jsonl.gz) or a CSV")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "", "neither .jsonl nor .csv"),
        ("x.csv", "a,b\n1,2\n", "unknown columns (a, b)"),
        ("x.jsonl", "", "holds no records; write it again from the run's database: nsa export RUN --journal"),
        ("x.jsonl", "{}\n", "line 1 is no record"),
        ("missing.jsonl", None, "cannot be read"),
        ("peers_h200.csv", ("4.651", "fast"), "peers_h200.csv line 2: forward_backward_ms: 'fast' is no number"),
        ("peers_h200.csv", (",2048,16,", ",2048,0,"), "Axes.batch: 0: use an integer of 1 to 2147483647"),
        ("peers_h200.csv", ("2026-11-20", "today"), "date: 'today' is no date; write YYYY-MM-DD"),
        ("peers_h200.csv", (",1.095,", ",1,095,"), "has 16 cells for 15 columns; quote the comma in a cell"),
        ("peers_h200.csv", ("triton,dtype", "torch,dtype"), "peers_h200.csv' line 1: 'torch': is named twice; rename"),
        ("seed_measurements.csv", (",ok,,", ",fine,,"), "state: 'fine' is unknown; use one of pending, running, ok, "),
        ("seed_measurements.csv", (",483,MiB", ",,MiB"), "value: '' is missing"),
    ],
)
def test_a_wrong_file_is_named_in_one_line(sqlite_store: Store, tmp_path: Path, name, content, message):
    path = tmp_path / name
    if isinstance(content, tuple):
        path.write_text((DATA / name).read_text().replace(*content))
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(sqlite_store, path)


ENDS = [PointState.OK, PointState.OOM, PointState.HANG, PointState.LOST, PointState.CANCELLED, PointState.ERROR]
T0 = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_each_point_has_what_is_stored_of_it(store: Store, sweep):
    def samples(number: int, length: int, attempt: int = 1, rank: int = 0) -> Record:
        times, values = (tuple(first + step for step in range(length)) for first in (T0.timestamp(), number))
        about = {"run_id": RUN, "point_id": f"{RUN}/{number}", "name": "loss", "unit": "nat/byte", "rank": rank}
        return SeriesRecord(**about, attempt=attempt, steps=tuple(range(length)), times=times, values=values)

    store.apply_many([*sweep(failures={PointState.HANG: "silent"}), *sweep("another")])
    store.apply_many([samples(0, 1, attempt=2), samples(8, 1), samples(0, 3), samples(0, 2, rank=1)])
    [run] = json.loads(exporter.to_json(store, [RUN]))
    for point in run["points"]:
        stored, metrics = queries.point(store, point["point_id"]) or {}, queries.metrics(store, point["point_id"])
        assert list(point) == [*stored, "metrics", "series"]
        assert point["config"] == stored["config"]
        assert [row["samples"] for row in point["metrics"]] == metrics["samples"].tolist()
    assert [len(point["metrics"]) for point in run["points"]] == [4] * 8 + [0]
    exported = [[(each["attempt"], each["rank"], each["values"]) for each in p["series"]] for p in run["points"]]
    assert exported == [[(1, 0, [0, 1, 2]), (1, 1, [0, 1]), (2, 0, [0])], *([[]] * 7), [(1, 0, [8])]]


def test_an_export_that_cannot_be_written_is_refused(sqlite_store: Store, tmp_path: Path):
    (tmp_path / "x.csv").mkdir()
    for name, problem in (("x.csv", r"written \(Is a directory\); choose"), ("x.xlsx", "neither .csv nor")):
        with pytest.raises(UserError, match=problem):
            exporter.export(sqlite_store, tmp_path / name, [])


@pytest.fixture
def other(new_database: Callable[[], str], store: Store) -> Iterator[Store]:
    """A second store of the same kind, without rows."""
    with Store.open(new_database()) as opened:
        yield opened


def life(seed: int, sweep: Callable[..., list[Record]]) -> list[Record]:
    """A made-up run: its points start, end in any state, are tried again, resumed and left as a killed driver does."""
    dice = random.Random(seed)
    begun, *made = sweep(RUN, gpu="H200" if seed % 2 else None)
    told: dict[str, Any] = {"submission_id": "raysubmit_1", "person": "ada", "artifact_store": "s3://bucket/nsa"}
    told |= {"quantities": (TIME, Quantity("loss", "nat/byte", "Loss")), "axes": (Axis("chunks", "whole", "chunks"),)}
    points = [record for record in made if isinstance(record, PointRecord)]
    ok = {record.point_id: record for record in made if isinstance(record, OutcomeRecord)}
    attempts = dict.fromkeys(ok, 0)
    records: list[Record] = []
    now = begun.at

    def later() -> dict[str, Any]:
        nonlocal now
        now += timedelta(seconds=dice.uniform(0.001, 9), microseconds=1)
        return {"run_id": RUN, "at": now}

    for resumed in range(1 + seed % 3):
        if dice.random() < 0.3:
            now -= timedelta(days=1)  # resumed on a host whose clock is behind
        at = later() if resumed else {}
        records.append(begun.model_copy(update={**told, **at, "resumed": resumed}))
        for point in points:
            if resumed and dice.random() < 0.5:
                continue
            where: dict[str, Any] = {"point_id": point.point_id}
            plan = {"attempt": attempts[point.point_id], "axes": {**point.axes, "env": "A=1", "chunks": 4}}
            skipped = dice.random() < 0.2
            plan |= {"state": PointState.SKIPPED, "reason": "needs 93 GiB"} if skipped else {}
            records.append(point.model_copy(update={**later(), **plan, "resumed": resumed}))
            attempts[point.point_id] += skipped
            for _ in range(0 if skipped else dice.choice([0, 0, 1, 1, 2])):
                attempts[point.point_id] += 1
                where["attempt"] = attempt = attempts[point.point_id]
                ended: dict[str, Any] = {"state": dice.choice(ENDS), "reason": "nul \0 byte"}
                if ended["state"] is PointState.OK:
                    ended |= {"metrics": ok[point.point_id].metrics, "route": ok[point.point_id].route, "reason": None}
                if dice.random() < 0.8:
                    records.append(StartRecord(**later(), **where, node="node-1"))
                    ended |= {"started_at": now, "environment": ok[point.point_id].environment}
                    if dice.random() < 0.2:  # still running
                        break
                steps = tuple(range(attempt))
                loss = {"name": "loss", "unit": "nat/byte", "rank": 1, "steps": steps}
                loss |= {"times": tuple(1.8e9 + 0.25 * n for n in steps), "values": tuple(map(float, steps))}
                file = {"name": f"log{attempt}.txt", "path": f"{RUN}/{attempt}", "size": 3, "sha256": "0"}
                records.append(SeriesRecord(**later(), **where, **loss))
                records.append(OutcomeRecord(**later(), **where, **ended))
                records.append(ArtifactRecord(**later(), **where, artifact=ArtifactData(**file, content="hi\n")))
                event = {"point_id": point.point_id, "level": "warning", "message": "tried \0 again"}
                records.append(EventRecord(**later(), **event))
            if attempts[point.point_id] == 0 and dice.random() < 0.3:  # as `nsa cancel` ends a waiting point
                attempts[point.point_id] = 1
                cancelled = {"attempt": 1, "state": PointState.CANCELLED, "reason": "asked to"}
                records.append(OutcomeRecord(**later(), **where, **cancelled))
        if dice.random() < 0.5:
            records.append(LabelRecord(**later(), tags=("b", "a"), notes="why"))
        if (end := dice.choice([*RunState, None])) not in (None, RunState.PENDING, RunState.RUNNING):
            records.append(RunEndRecord(**later(), state=end, reason=dice.choice([None, "why"]), resumed=resumed))
    return records


@pytest.mark.parametrize("seed", range(5))
def test_a_runs_records_give_the_same_rows_in_another_database(store: Store, other: Store, sweep, tmp_path, seed: int):
    lived = life(seed, sweep)
    store.apply_many(lived)
    before = rows_of(store)
    told = exporter.records(store, RUN)
    with Journal(tmp_path / "run" / journal.NAME) as book:
        book.append(told)
    read = list(journal.read(tmp_path / "run" / journal.NAME))
    other.apply_many(read)
    assert rows_of(other) == before
    other.apply_many(read)
    store.apply_many(read)
    assert rows_of(other) == rows_of(store) == before
    other.apply_many(lived)  # older records do not undo the rebuilt ones
    assert rows_of(other)["point"] == before["point"]
    kept, rebuilt = plan.history(lived), plan.history(told)
    assert kept is not None
    assert rebuilt is not None
    assert attempts_of(rebuilt) == attempts_of(kept)
    assert rebuilt.run.resumed == kept.run.resumed
