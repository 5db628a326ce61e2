"""Runs whose every text tries to be more than text: pictures, links, tags, colours, and a backtick without a second."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime

from jobs.schema.quantities import TIME
from jobs.schema.states import PointState, RunState
from orchestrator.store import Store
from orchestrator.store import records as rec

ENDED, GOING = "20201121-100000-hostile-ab12", "20201121-110000-hostile-cd34"
TEXT = "![x](http://evil.invalid/x.png) <img src='http://evil.invalid/y'> [z](http://evil.invalid) :red[r] = ` `` odd"
SHORT = "<i>[z](//x.invalid)"
LIVE = re.compile(r"(?<!\\)(?:!\[x|\[z\]|<i|:red\[r)")
"""A mark of TEXT or SHORT on which Markdown or HTML would act."""

_AT = datetime(2020, 11, 21, 10, tzinfo=UTC)


def store_hostile_runs(url: str) -> None:
    """Store a run that ended, with a point that is ok and one that failed, and one that goes on."""
    with Store.open(url) as store:
        store.apply_many([*_run(ENDED), *_ok(f"{ENDED}/0"), *_failed(f"{ENDED}/1")])
        store.apply(rec.EventRecord(run_id=ENDED, level="warning", message=TEXT))
        store.apply(rec.RunEndRecord(run_id=ENDED, at=_AT, state=RunState.FAILED, reason=TEXT))
        store.apply_many([*_run(GOING), *_started(f"{GOING}/0")])
        store.beat(GOING, f"{GOING}/0", datetime.now(UTC), TEXT, 3, 10, 0.5)
    path = url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:  # what no journal may hold, and another program may write
        connection.execute("UPDATE run SET kind = ? WHERE id = ?", (SHORT, GOING))
    connection.close()


def _run(run_id: str) -> list[rec.Record]:
    told = dict.fromkeys(("name", "source", "host", "git_branch", "artifacts", "artifact_store"), TEXT)
    begun = {"git_commit": SHORT, "git_dirty": True, "code_hash": SHORT, "submission_id": TEXT, "spec": {TEXT: TEXT}}
    titled = replace(TIME, title=TEXT, short=TEXT)
    return [
        rec.RunRecord(run_id=run_id, at=_AT, kind="scaling", spec_hash=SHORT, quantities=(titled,), **told, **begun)
    ]


def _started(point_id: str) -> list[rec.Record]:
    run_id, _, index = point_id.rpartition("/")
    axes = {"implementation": SHORT, "workload": "attention", "pass_": "forward", "seq_len": 64, "batch": 1} | {
        "dtype": "float32", "device": "cpu", "query_heads": 4, "kv_heads": 2, "head_dim": 16,
        "env": TEXT, "python": TEXT,
    }  # fmt: skip
    point = {"run_id": run_id, "at": _AT, "point_id": point_id}
    return [
        rec.PointRecord(**point, index=int(index), key=SHORT, label=TEXT, config={TEXT: TEXT}, axes=axes),
        rec.StartRecord(**point, attempt=1, node=TEXT),
    ]


def _ok(point_id: str) -> list[rec.Record]:
    point = {"run_id": ENDED, "at": _AT, "point_id": point_id, "attempt": 1}
    measured = {"value": 1.5, "samples": (1.0, 1.5, 2.0), "method": TEXT}
    metrics = [rec.MetricData(name=name, unit=unit, **measured) for name, unit in (("time", "ms"), (SHORT, SHORT))]
    environment = {"gpu": {"name": TEXT}, "host": TEXT, TEXT: TEXT}
    series = {"steps": (1, 2), "times": (_AT.timestamp(),) * 2, "values": (1.0, 2.0)}
    return [
        *_started(point_id),
        rec.SeriesRecord(**point, rank=0, name=SHORT, unit=SHORT, **series),
        rec.OutcomeRecord(
            **point, state=PointState.OK, started_at=_AT, metrics=tuple(metrics), route={"slc": TEXT, SHORT: TEXT},
            environment=environment,
        ),
        _file(point_id),
    ]  # fmt: skip


def _failed(point_id: str) -> list[rec.Record]:
    point = {"run_id": ENDED, "at": _AT, "point_id": point_id}
    return [
        *_started(point_id),
        rec.OutcomeRecord(**point, attempt=1, state=PointState.ERROR, reason=TEXT),
        rec.EventRecord(**point, level="warning", message=TEXT),
        _file(point_id),
    ]


def _file(point_id: str) -> rec.Record:
    file = rec.ArtifactData(name=TEXT, path=f"{point_id}/1/a", size=len(TEXT), sha256="0" * 64, content=TEXT)
    return rec.ArtifactRecord(run_id=ENDED, at=_AT, point_id=point_id, attempt=1, artifact=file)
