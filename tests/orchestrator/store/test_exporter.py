"""Exports: as JSON each point with what is stored of it, as a journal the records that give the same rows elsewhere."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from statements import attempts_of, rows_of

from jobs.schema.axes import Axis
from jobs.schema.quantities import TIME, Quantity
from jobs.schema.states import PointState, RunState
from orchestrator.errors import UserError
from orchestrator.run import plan
from orchestrator.store import Store, exporter, journal, queries
from orchestrator.store.journal import Journal
from orchestrator.store.records import (
    ArtifactData,
    ArtifactRecord,
    EventRecord,
    LabelRecord,
    OutcomeRecord,
    PointRecord,
    Record,
    RunEndRecord,
    RunRecord,
    SeriesRecord,
    StartRecord,
)

RUN = "20261120-120000-demo-abcd"
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


class Life:
    """A made-up run: its points start, end in any state, are tried again, resumed and left as a killed driver does."""

    def __init__(self, seed: int, sweep: Callable[..., list[Record]]) -> None:
        self.random = random.Random(seed)
        begun, *made = sweep(RUN, gpu="H200" if seed % 2 else None)
        assert isinstance(begun, RunRecord)
        self.now = begun.at
        axes = (Axis("chunks", "whole", "chunks"),)
        self.begun = begun.model_copy(
            update={
                "quantities": (TIME, Quantity("loss", "nat/byte", "Loss")),
                "axes": axes,
                "submission_id": "raysubmit_1",
                "person": "ada",
                "artifact_store": "s3://bucket/nsa",
            }
        )
        self.points = [r for r in made if isinstance(r, PointRecord)]
        self.ok = {r.point_id: r for r in made if isinstance(r, OutcomeRecord)}
        self.attempts = dict.fromkeys((p.point_id for p in self.points), 0)
        self.records: list[Record] = []

    def later(self) -> dict:
        self.now += timedelta(seconds=self.random.uniform(0.001, 9), microseconds=1)
        return {"run_id": RUN, "at": self.now}

    def run(self) -> list[Record]:
        for resumed in range(self.random.randint(1, 3)):
            self.resumed = resumed
            if self.random.random() < 0.3:
                self.now -= timedelta(days=1)  # resumed on a host whose clock is behind
            at = self.later()["at"] if resumed else self.begun.at
            self.records.append(self.begun.model_copy(update={"at": at, "resumed": resumed}))
            for point in self.points:
                if not resumed or self.random.random() < 0.5:
                    self.plan(point)
                    self.live(point)
            if self.random.random() < 0.5:
                self.records.append(LabelRecord(**self.later(), tags=("b", "a"), notes="why"))
            end = self.random.choice([*RunState, None])
            if end not in (None, RunState.PENDING, RunState.RUNNING):
                self.records.append(self.end(end))
        return self.records

    def end(self, state: RunState) -> RunEndRecord:
        reason = self.random.choice([None, "why"])
        return RunEndRecord(**self.later(), state=state, reason=reason, resumed=self.resumed)

    def plan(self, point: PointRecord) -> None:
        skipped = self.random.random() < 0.2
        changes = {
            "attempt": self.attempts[point.point_id],
            "resumed": self.resumed,
            "axes": {**point.axes, "env": "A=1", "chunks": 4},
            "state": PointState.SKIPPED if skipped else PointState.PENDING,
            "reason": "needs 93 GiB" if skipped else None,
        }
        self.skipped = skipped
        self.attempts[point.point_id] += skipped
        self.records.append(point.model_copy(update={**self.later(), **changes}))

    def live(self, point: PointRecord) -> None:
        where = {"point_id": point.point_id}
        for _ in range(self.random.choice([0, 0, 1, 1, 2]) if not self.skipped else 0):
            self.attempts[point.point_id] += 1
            where["attempt"] = attempt = self.attempts[point.point_id]
            started = self.random.random() < 0.8
            if started:
                self.records.append(StartRecord(**self.later(), **where, node="node-1"))
            began = self.now if started else None
            if started and self.random.random() < 0.2:
                return  # still running
            steps = tuple(range(attempt))
            told = {"steps": steps, "times": tuple(1.8e9 + 0.25 * n for n in steps), "values": tuple(map(float, steps))}
            self.records.append(
                SeriesRecord(run_id=RUN, at=self.now, **where, rank=1, name="loss", unit="nat/byte", **told)
            )
            state = self.random.choice(ENDS)
            ok = self.ok[point.point_id]
            more = {"metrics": ok.metrics, "route": ok.route} if state is PointState.OK else {"reason": "nul \0 byte"}
            environment = ok.environment if started else {}
            self.records.append(
                OutcomeRecord(**self.later(), **where, state=state, started_at=began, environment=environment, **more)
            )
            file = ArtifactData(name=f"log{attempt}.txt", path=f"{RUN}/{attempt}", size=3, sha256="0", content="hi\n")
            self.records.append(ArtifactRecord(**self.later(), **where, artifact=file))
            event = EventRecord(**self.later(), point_id=point.point_id, level="warning", message="tried \0 again")
            self.records.append(event)
        if self.attempts[point.point_id] == 0 and self.random.random() < 0.3:  # as `nsa cancel` ends a waiting point
            self.attempts[point.point_id] = 1
            asked = {"attempt": 1, "state": PointState.CANCELLED, "reason": "asked to"}
            self.records.append(OutcomeRecord.model_validate({**self.later(), **where, **asked}))


@pytest.mark.parametrize("seed", range(5))
def test_a_runs_records_give_the_same_rows_in_another_database(store: Store, other: Store, sweep, tmp_path, seed: int):
    lived = Life(seed, sweep).run()
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
