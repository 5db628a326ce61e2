"""Made-up runs, and databases as a reader meets them: complete, half-finished, empty, away, hostile."""

import math
import re
import shutil
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jobs.schema.quantities import TIME
from jobs.schema.states import PointState, RunState
from orchestrator.store import Store, importer
from orchestrator.store import records as rec

ROOT = Path(__file__).resolve().parents[2]
RUN = "20261121-100000-demo-ab12"
HALF = "20261121-113000-m7c-cd34"
T0 = datetime(2026, 11, 21, 10, tzinfo=UTC)
# ms and MiB at S=1024, and the exponents of time and memory
LAWS = {"chunked": (60.0, 40.0, 1.05, 1.0), "naive": (50.0, 210.0, 2.0, 2.0), "dense": (12.0, 60.0, 1.9, 2.0)}
LENGTHS = (512, 1024, 2048, 4096)
LOG = 'Traceback (most recent call last):\n  File "worker.py", line 7\nRuntimeError: deliberate\n'

ENDED, GOING = "20201121-100000-hostile-ab12", "20201121-110000-hostile-cd34"
TEXT = "![x](http://evil.invalid/x.png) <img src='http://evil.invalid/y'> [z](http://evil.invalid) :red[r] = ` `` odd"
SHORT = "<i>[z](//x.invalid)"
LIVE = re.compile(r"(?<!\\)(?:!\[x|\[z\]|<i|:red\[r)")
"""A mark of TEXT or SHORT on which Markdown or HTML would act."""


def planned(
    run_id: str, number: int, implementation: str, seq_len: int, at: datetime, axes: Any = None, **more: Any
) -> rec.PointRecord:
    """A point of attention with 12/2 heads of 64, forward+backward, float32 on a CPU; `axes` are laid over these."""
    shape = {"seq_len": seq_len, "batch": 1, "query_heads": 12, "kv_heads": 2, "head_dim": 64, "layers": None}
    what = {"implementation": implementation, "workload": "attention", "pass_": "forward+backward", "dtype": "float32"}
    point = {
        "run_id": run_id,
        "at": at,
        "point_id": f"{run_id}/{number}",
        "index": number,
        "key": f"{number:016x}",
        "label": f"{implementation} S={seq_len}",
        "config": {"seq_len": seq_len},
        "axes": what | shape | {"device": "cpu"} | (axes or {}),
    }
    return rec.PointRecord.model_validate(point | more)


def attempt(
    plan: rec.PointRecord,
    start: datetime,
    seconds: float,
    state: PointState,
    file: dict[str, Any] | None = None,
    **outcome: Any,
) -> list[rec.Record]:
    """A planned point, and its only attempt, with a file if one is given."""
    about = {"run_id": plan.run_id, "point_id": plan.point_id, "attempt": 1}
    end = start + timedelta(seconds=seconds)
    records: list[rec.Record] = [plan, rec.StartRecord(**about, at=start, node="bench1")]
    records.append(rec.OutcomeRecord.model_validate({**about, "at": end, "state": state, **outcome}))
    if file:
        kept = rec.ArtifactData(size=len(file["content"]), **file)
        records.append(rec.ArtifactRecord(**about, at=end, artifact=kept))
    return records


def metrics(**values: float) -> list[dict[str, Any]]:
    units = {"time": "ms", "peak_extra_memory": "MiB", "throughput": "tok/s"}
    return [{"name": name, "unit": units.get(name, "1"), "value": value} for name, value in values.items()]


def make_sweep(
    run_id: str = "20261120-120000-demo-abcd",
    laws: dict[str, float] | None = None,
    lengths: Sequence[int] = LENGTHS,
    batch: int = 1,
    failures: dict[PointState, str] | None = None,
    gpu: str | None = None,
) -> list[rec.Record]:
    """Records of a finished run: time and memory c * S**exponent per sequence of each implementation, then failures."""
    begun = datetime(2026, 11, 20, 12, tzinfo=UTC)

    def at(seconds: float) -> datetime:
        return begun + timedelta(seconds=seconds)

    spec = {"kind": "scaling", "name": "demo"}
    told = {"git_commit": "c" * 40, "git_dirty": False, "host": "bench1"}
    records: list[rec.Record] = [
        rec.RunRecord(run_id=run_id, at=at(0), name="demo", kind="scaling", spec=spec, spec_hash="5" * 16, **told)
    ]
    environment = {"torch": "2.13", "host": "bench1", "gpu": {"name": gpu, "driver": "580", "uuid": "GPU-1"}}
    coordinates = [(name, length) for name in laws or {"chunked": 1.0, "naive": 2.0} for length in lengths]
    for number, (implementation, seq_len) in enumerate(coordinates):
        value = batch * (seq_len / 512) ** (laws or {"chunked": 1.0, "naive": 2.0})[implementation]
        rate = 1000 * batch * seq_len / value
        time, memory, *others = metrics(time=value, peak_extra_memory=3 * value, throughput=rate, oracle_error=1e-6)
        axes = {"batch": batch, "device": "cuda" if gpu else "cpu"}
        records += attempt(
            planned(run_id, number, implementation, seq_len, at(1), axes, estimate_bytes=seq_len * 2**20),
            at(10 + 10 * number),
            5,
            PointState.OK,
            {"name": "stdout.txt", "path": f"{run_id}/stdout.txt", "sha256": "0", "content": "hi\n"},
            started_at=at(10 + 10 * number),
            metrics=[
                time | {"samples": (value,) * 6, "ci_low": value * 0.9, "ci_high": value * 1.1},
                memory | {"method": "allocator"},
                *others,
            ],
            route=dict.fromkeys(("cmp", "slc", "win"), implementation),
            environment=environment,
        )
    for number, (state, reason) in enumerate((failures or {}).items(), len(coordinates)):
        plan = planned(run_id, number, "naive", 65536 + number, at(1))
        if state is PointState.SKIPPED:
            records.append(plan.model_copy(update={"state": state, "reason": reason}))
        else:
            records += attempt(plan, at(10 + 10 * number), 5, state, reason=reason)
    records.append(rec.EventRecord(run_id=run_id, at=at(900), level="warning", message="the database was away for 3 s"))
    return [*records, rec.RunEndRecord(run_id=run_id, at=at(1000), state=RunState.DONE)]


def changed(
    records: Iterable[rec.Record],
    axes: Mapping[str, Any] | None = None,
    metrics: Sequence[rec.MetricData] = (),
    year: int | None = None,
    run: Mapping[str, Any] | None = None,
) -> list[rec.Record]:
    """The records with `axes` laid over the points', more metrics where a point is ok, another year, a changed run."""
    found = []
    for record in records:
        update: dict[str, Any] = {} if year is None else {"at": record.at.replace(year=year)}
        if isinstance(record, rec.RunRecord):
            update |= run or {}
        elif isinstance(record, rec.PointRecord):
            update["axes"] = {**record.axes, **(axes or {})}
        elif isinstance(record, rec.OutcomeRecord) and record.metrics:
            update["metrics"] = (*record.metrics, *metrics)
        found.append(record.model_copy(update=update))
    return found


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a database that does not exist yet, as the settings name it."""
    url = f"sqlite:///{tmp_path / 'nsa.db'}"
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    monkeypatch.setenv("NSA_DATABASE_URL", url)
    return url


@pytest.fixture(scope="session")
def complete_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The complete database, made once; tests take copies."""
    path = tmp_path_factory.mktemp("complete") / "nsa.db"
    with Store.open(f"sqlite:///{path}") as store:
        store.apply_many(sweep())
        for table in sorted((ROOT / "orchestrator" / "reference_data").glob("*.csv")):
            importer.import_file(store, table)
    return path


@pytest.fixture
def complete(database: str, complete_file: Path) -> str:
    """A finished sweep with failures, and the figures that others report."""
    shutil.copy(complete_file, database.removeprefix("sqlite:///"))
    return database


@pytest.fixture
def half_finished(database: str) -> str:
    """A run that is going on: two points ended, one is running, the rest wait; nothing else is stored."""
    started = datetime.now(UTC) - timedelta(minutes=3)
    with Store.open(database) as store:
        store.apply_many(small_sweep(HALF, (512, 1024), None, at=started, name="m7c"))
        store.apply_many(_planned(HALF, n, "chunked", "forward+backward", 512 << n, started) for n in (2, 3, 4))
        store.apply_many([rec.StartRecord(run_id=HALF, at=started, point_id=f"{HALF}/2", attempt=1, node="bench1")])
        store.beat(rec.Progress(HALF, f"{HALF}/2", datetime.now(UTC), "timing", 3, 10))
    return database


def sweep() -> list[rec.Record]:
    """A finished run: three implementations over four lengths and two passes, and points that failed."""
    records: list[rec.Record] = [_run(RUN, "demo", T0)]
    coordinates = product((("forward", 1.0), ("forward+backward", 3.0)), LAWS, LENGTHS)
    for number, ((pass_, factor), implementation, seq_len) in enumerate(coordinates):
        records += _ok(RUN, number, implementation, pass_, seq_len, factor, T0)
    failed = {
        PointState.OOM: "needed 12.1 GiB of 8.0 GiB",
        PointState.HANG: "no progress for 120 s in phase 'timing'; stacks are in stacks.txt",
        PointState.ERROR: "RuntimeError: deliberate",
    }
    for number, (state, reason) in enumerate(failed.items(), 24):
        plan = _planned(RUN, number, "naive", "forward+backward", 8192 + number, T0)
        file = {"name": "stderr.txt", "path": f"{RUN}/{number}/stderr.txt", "sha256": "1" * 64, "content": LOG}
        start = T0 + timedelta(seconds=2 * number)
        records += attempt(plan, start, 5, state, file | {"truncated": True}, reason=reason)
    skipped = "needs 93.1 GiB, the device has 8.0 GiB; shorten lengths or use chunked"
    plan = _planned(RUN, 27, "naive", "forward+backward", 65536, T0)
    records.append(plan.model_copy(update={"state": PointState.SKIPPED, "reason": skipped}))
    records.append(rec.EventRecord(run_id=RUN, at=T0, level="warning", message="the database was away for 3 s"))
    return [*records, rec.RunEndRecord(run_id=RUN, at=T0 + timedelta(minutes=2), state=RunState.DONE)]


def small_sweep(
    run_id: str,
    lengths: Sequence[int],
    state: RunState | None,
    kind: str = "scaling",
    at: datetime = T0 + timedelta(hours=3),
    name: str = "small",
) -> list[rec.Record]:
    """A later run of one implementation, every point ok; `state` None: it goes on."""
    records: list[rec.Record] = [_run(run_id, name, at).model_copy(update={"kind": kind})]
    for number, seq_len in enumerate(lengths):
        records += _ok(run_id, number, "chunked", "forward+backward", seq_len, 3.0, at)
    return records if state is None else [*records, rec.RunEndRecord(run_id=run_id, at=at, state=state)]


def _run(run_id: str, name: str, at: datetime) -> rec.RunRecord:
    spec = {"kind": "scaling", "name": name, "lengths": list(LENGTHS), "implementations": list(LAWS)}
    return rec.RunRecord(
        run_id=run_id, at=at, name=name, kind="scaling", spec=spec, spec_hash="5" * 16, git_commit="c0ffee" * 6,
        git_dirty=True, code_hash="a" * 16, host="bench1", submission_id="raysubmit_1", artifacts="/data/artifacts",
    )  # fmt: skip


def _planned(run_id: str, number: int, implementation: str, pass_: str, seq_len: int, at: datetime) -> rec.PointRecord:
    more = {"config": {"seq_len": seq_len, "nsa": {"window": 512}}, "estimate_bytes": seq_len * 2**15}
    label = f"{implementation} {pass_} S={seq_len}"
    return planned(run_id, number, implementation, seq_len, at, {"pass_": pass_}, label=label, **more)


def _ok(
    run_id: str, number: int, implementation: str, pass_: str, seq_len: int, factor: float, at: datetime
) -> list[rec.Record]:
    time_1k, memory_1k, time_slope, memory_slope = LAWS[implementation]
    wobble = 1 + 0.03 * math.sin(7.0 * number)  # measurements are not perfectly on a line
    time = factor * wobble * time_1k * (seq_len / 1024) ** time_slope
    memory = factor * wobble * memory_1k * (seq_len / 1024) ** memory_slope
    start = at + timedelta(seconds=2 * number)
    spread = {
        "samples": tuple(time * (1 + 0.02 * math.cos(k)) for k in range(12)), "p10": time * 0.97, "p90": time * 1.04,
        "ci_low": time * 0.98, "ci_high": time * 1.02, "method": "perf_counter, median",
    }  # fmt: skip
    timed, allocated, *others = metrics(
        time=time,
        peak_extra_memory=memory,
        throughput=1000 * seq_len / time,
        oracle_error=1e-7,
        oracle_error_bound=1e-5,
    )
    return attempt(
        _planned(run_id, number, implementation, pass_, seq_len, at),
        start,
        1.4,
        PointState.OK,
        {"name": "stdout.txt", "path": f"{run_id}/{number}/stdout.txt", "sha256": "0" * 64, "content": "warm\n"},
        started_at=start,
        metrics=[timed | spread, allocated | {"method": "sum of the allocator's events"}, *others],
        route=dict.fromkeys(("cmp", "slc", "win"), implementation),
        environment={
            "torch": "2.13.0", "python": "3.11.7", "host": "bench1", "variables": {"OMP_NUM_THREADS": "2"},
        },
    )  # fmt: skip


def store_hostile_runs(url: str) -> None:
    """Store a run that ended, with a point that is ok and one that failed, and one that goes on, whose every text tries
    to be more than text: pictures, links, tags, colours, and a backtick without a second."""
    at = datetime(2020, 11, 21, 10, tzinfo=UTC)
    told = dict.fromkeys(("name", "source", "host", "git_branch", "artifacts", "artifact_store"), TEXT)
    begun = {"git_commit": SHORT, "git_dirty": True, "code_hash": SHORT, "submission_id": TEXT, "spec": {TEXT: TEXT}}
    begun |= {"spec_hash": SHORT, "quantities": (replace(TIME, title=TEXT, short=TEXT),)}
    first = rec.RunRecord(run_id=ENDED, at=at, kind="scaling", **told, **begun)
    odd = {"env": TEXT, "python": TEXT, "pass_": "forward", "query_heads": 4, "head_dim": 16}
    more = {"key": SHORT, "label": TEXT, "config": {TEXT: TEXT}}
    file = {"name": TEXT, "sha256": "0" * 64, "content": TEXT}
    measured = {"value": 1.5, "samples": (1.0, 1.5, 2.0), "method": TEXT}
    right, wrong, going = (
        planned(run_id, number, SHORT, 64, at, odd, **more) for run_id, number in ((ENDED, 0), (ENDED, 1), (GOING, 0))
    )
    ok = attempt(
        right,
        at,
        0,
        PointState.OK,
        file | {"path": f"{ENDED}/0/1/a"},
        started_at=at,
        metrics=[{"name": name, "unit": unit, **measured} for name, unit in (("time", "ms"), (SHORT, SHORT))],
        route={"slc": TEXT, SHORT: TEXT},
        environment={"gpu": {"name": TEXT}, "host": TEXT, TEXT: TEXT},
    )
    failed = attempt(wrong, at, 0, PointState.ERROR, file | {"path": f"{ENDED}/1/1/a"}, reason=TEXT)
    series = {"steps": (1, 2), "times": (at.timestamp(),) * 2, "values": (1.0, 2.0), "name": SHORT, "unit": SHORT}
    with Store.open(url) as store:
        records = [
            first,
            *ok,
            *failed,
            first.model_copy(update={"run_id": GOING}),
            *attempt(going, at, 0, PointState.OK),
        ]
        starts = {"node": TEXT}
        store.apply_many(r.model_copy(update=starts) if r.type == "start" else r for r in records[:-1])
        store.apply_many(
            [
                rec.SeriesRecord(run_id=ENDED, at=at, point_id=right.point_id, attempt=1, rank=0, **series),
                rec.EventRecord(run_id=ENDED, at=at, point_id=wrong.point_id, level="warning", message=TEXT),
                rec.EventRecord(run_id=ENDED, level="warning", message=TEXT),
                rec.RunEndRecord(run_id=ENDED, at=at, state=RunState.FAILED, reason=TEXT),
            ]
        )
        store.beat(rec.Progress(GOING, going.point_id, datetime.now(UTC), TEXT, 3, 10, 0.5))
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:  # what no journal may hold
        connection.execute("UPDATE run SET kind = ? WHERE id = ?", (SHORT, GOING))
    connection.close()
