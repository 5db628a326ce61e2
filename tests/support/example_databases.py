"""Databases as a reader meets them: complete, half-finished, empty, away."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

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
    fill(f"sqlite:///{path}")
    return path


@pytest.fixture
def complete(database: str, complete_file: Path) -> str:
    """A finished sweep with failures, and the figures that others report."""
    shutil.copy(complete_file, database.removeprefix("sqlite:///"))
    return database


@pytest.fixture
def half_finished(database: str) -> str:
    """A run that is going on: two points ended, one is running, the rest wait; nothing else is stored."""
    with Store.open(database) as store:
        store.apply_many(half_finished_run())
        store.beat(HALF, f"{HALF}/2", datetime.now(UTC), "timing", 3, 10)
    return database


def fill(url: str) -> None:
    """The complete database at `url`."""
    with Store.open(url) as store:
        store.apply_many(sweep())
        for table in sorted((ROOT / "orchestrator" / "reference_data").glob("*.csv")):
            importer.import_file(store, table)


def sweep() -> list[rec.Record]:
    """A finished run: three implementations over four lengths and two passes, and points that failed."""
    records: list[rec.Record] = [_run(RUN, "demo", T0)]
    number = 0
    for pass_, factor in (("forward", 1.0), ("forward+backward", 3.0)):
        for implementation in LAWS:
            for seq_len in LENGTHS:
                records += _ok(RUN, number, implementation, pass_, seq_len, factor)
                number += 1
    failed = {
        PointState.OOM: "needed 12.1 GiB of 8.0 GiB",
        PointState.HANG: "no progress for 120 s in phase 'timing'; stacks are in stacks.txt",
        PointState.ERROR: "RuntimeError: deliberate",
    }
    for state, reason in failed.items():
        records += _failed(RUN, number, state, reason)
        number += 1
    skipped = "needs 93.1 GiB, the device has 8.0 GiB; shorten lengths or use chunked"
    records.append(_planned(RUN, number, "naive", "forward+backward", 65536, PointState.SKIPPED, skipped))
    records.append(rec.EventRecord(run_id=RUN, at=T0, level="warning", message="the database was away for 3 s"))
    records.append(rec.RunEndRecord(run_id=RUN, at=T0 + timedelta(minutes=2), state=RunState.DONE))
    return records


def small_sweep(
    run_id: str, lengths: Sequence[int], state: RunState | None, kind: str = "scaling", hours: int = 3
) -> list[rec.Record]:
    """A later run of one implementation, every point ok; `state` None: it goes on."""
    at = T0 + timedelta(hours=hours)
    records: list[rec.Record] = [_run(run_id, "small", at).model_copy(update={"kind": kind})]
    for number, seq_len in enumerate(lengths):
        records += _ok(run_id, number, "chunked", "forward+backward", seq_len, 3.0, at=at)
    return records if state is None else [*records, rec.RunEndRecord(run_id=run_id, at=at, state=state)]


def half_finished_run() -> list[rec.Record]:
    started = datetime.now(UTC) - timedelta(minutes=3)
    records: list[rec.Record] = [_run(HALF, "m7c", started)]
    for number, seq_len in enumerate((512, 1024)):
        records += _ok(HALF, number, "chunked", "forward+backward", seq_len, 3.0, at=started)
    for number, seq_len in enumerate((2048, 4096, 8192), 2):
        records.append(_planned(HALF, number, "chunked", "forward+backward", seq_len, at=started))
    records.append(rec.StartRecord(run_id=HALF, at=started, point_id=f"{HALF}/2", attempt=1, node="bench1"))
    return records


def _run(run_id: str, name: str, at: datetime) -> rec.RunRecord:
    spec = {"kind": "scaling", "name": name, "lengths": list(LENGTHS), "implementations": list(LAWS)}
    return rec.RunRecord(
        run_id=run_id, at=at, name=name, kind="scaling", spec=spec, spec_hash="5" * 16, git_commit="c0ffee" * 6,
        git_dirty=True, code_hash="a" * 16, host="bench1", submission_id="raysubmit_1", artifacts="/data/artifacts",
    )  # fmt: skip


def _planned(
    run_id: str, number: int, implementation: str, pass_: str, seq_len: int,
    state: PointState = PointState.PENDING, reason: str | None = None, at: datetime = T0,
) -> rec.PointRecord:  # fmt: skip
    axes = {
        "implementation": implementation, "workload": "attention", "pass_": pass_, "seq_len": seq_len, "batch": 1,
        "query_heads": 12, "kv_heads": 2, "head_dim": 64, "layers": None, "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    label = f"{implementation} {pass_} S={seq_len}"
    return rec.PointRecord(
        run_id=run_id, at=at, point_id=f"{run_id}/{number}", index=number, key=f"{number:016x}", label=label,
        config={"seq_len": seq_len, "nsa": {"window": 512}}, axes=axes, estimate_bytes=seq_len * 2**15, state=state,
        reason=reason,
    )  # fmt: skip


def _ok(
    run_id: str, number: int, implementation: str, pass_: str, seq_len: int, factor: float, at: datetime = T0
) -> list[rec.Record]:
    time_1k, memory_1k, time_slope, memory_slope = LAWS[implementation]
    wobble = 1 + 0.03 * math.sin(7.0 * number)  # measurements are not perfectly on a line
    time = factor * wobble * time_1k * (seq_len / 1024) ** time_slope
    memory = factor * wobble * memory_1k * (seq_len / 1024) ** memory_slope
    start = at + timedelta(seconds=2 * number)
    metrics = (
        rec.MetricData(
            name="time", unit="ms", value=time, samples=tuple(time * (1 + 0.02 * math.cos(k)) for k in range(12)),
            p10=time * 0.97, p90=time * 1.04, ci_low=time * 0.98, ci_high=time * 1.02, method="perf_counter, median",
        ),
        rec.MetricData(name="peak_extra_memory", unit="MiB", value=memory, method="sum of the allocator's events"),
        rec.MetricData(name="throughput", unit="tok/s", value=1000 * seq_len / time),
        rec.MetricData(name="oracle_error", unit="1", value=1e-7),
        rec.MetricData(name="oracle_error_bound", unit="1", value=1e-5),
    )  # fmt: skip
    stdout = rec.ArtifactData(name="stdout.txt", path=f"{number}/stdout.txt", size=5, sha256="0" * 64, content="warm\n")
    environment = {"torch": "2.13.0", "python": "3.11.7", "host": "bench1", "variables": {"OMP_NUM_THREADS": "2"}}
    point_id = f"{run_id}/{number}"
    return [
        _planned(run_id, number, implementation, pass_, seq_len, at=at),
        rec.StartRecord(run_id=run_id, at=start, point_id=point_id, attempt=1, node="bench1"),
        rec.OutcomeRecord(
            run_id=run_id, at=start + timedelta(seconds=1.4), point_id=point_id, attempt=1, state=PointState.OK,
            started_at=start, metrics=metrics, route=dict.fromkeys(("cmp", "slc", "win"), implementation),
            environment=environment,
        ),
        _file(point_id, start + timedelta(seconds=1.4), stdout),
    ]  # fmt: skip


def _failed(run_id: str, number: int, state: PointState, reason: str) -> list[rec.Record]:
    point_id, start = f"{run_id}/{number}", T0 + timedelta(seconds=2 * number)
    stderr = rec.ArtifactData(
        name="stderr.txt", path=f"{number}/stderr.txt", size=len(LOG), sha256="1" * 64, content=LOG, truncated=True
    )
    return [
        _planned(run_id, number, "naive", "forward+backward", 8192 + number),
        rec.StartRecord(run_id=run_id, at=start, point_id=point_id, attempt=1, node="bench1"),
        rec.OutcomeRecord(
            run_id=run_id, at=start + timedelta(seconds=5), point_id=point_id, attempt=1, state=state, reason=reason,
        ),
        _file(point_id, start + timedelta(seconds=5), stderr),
    ]  # fmt: skip


def _file(point_id: str, at: datetime, file: rec.ArtifactData) -> rec.ArtifactRecord:
    run_id = point_id.rpartition("/")[0]
    stored = file.model_copy(update={"path": f"{run_id}/{file.path}"})
    return rec.ArtifactRecord(run_id=run_id, at=at, point_id=point_id, attempt=1, artifact=stored)
