"""The queries on SQLite and on a real Postgres, with the columns that the dashboard and the reports use."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from made_up_runs import attempt, planned
from sqlalchemy import select, text

from jobs.schema.states import Origin, PointState, RunState, run_in_words
from orchestrator.store import Store, exporter, importer, queries
from orchestrator.store.records import LabelRecord, MetricData, PointRecord, RunEndRecord, RunRecord
from orchestrator.store.views import v_runs, v_scaling

DOCS = Path(__file__).parents[3] / "docs" / "database.md"
RUN = "20261120-120000-demo-abcd"
SCALING = (
    "run_id run_name origin source point_id label state implementation workload pass seq_len batch query_heads "
    "kv_heads head_dim layers dtype device env python gpu backend metric unit value ci_low ci_high per_sequence "
    "ended_at plot"
)


@pytest.fixture
def filled(store: Store, sweep) -> Store:
    failures = {PointState.HANG: "silent for 120 s", PointState.SKIPPED: "needs 93.1 GiB"}
    store.apply_many(sweep(batch=2, failures=failures, gpu="NVIDIA H200"))
    reported = datetime(2025, 8, 25, tzinfo=UTC)
    store.apply_many(
        [
            RunRecord(
                run_id="seeds", at=reported, name="seed", kind="reported", spec={}, spec_hash="0",
                origin=Origin.REPORTED, source="report_000",
            ),
            *attempt(
                planned("seeds", 0, "nsa-vibe", 512, reported), reported, 0, PointState.OK,
                metrics=(MetricData(name="peak_memory", unit="MiB", value=5165),),
            ),
            LabelRecord(run_id="seeds", at=reported, tags=("Best",)),
            RunEndRecord(run_id="seeds", at=reported, state=RunState.DONE),
        ]
    )  # fmt: skip
    return store


def test_nsa_finds_the_projects_own_in_sql_and_again_in_an_imported_export(store: Store, sweep, tmp_path: Path):
    store.apply_many(sweep(laws={"triton": 1.0, "dense": 2.0}))
    run_id = queries.runs(store).run_id[0]
    exporter.export(store, tmp_path / "export.csv", [run_id])
    importer.import_file(store, tmp_path / "export.csv")
    found = select(v_scaling.c.origin, v_scaling.c.backend).where(v_scaling.c.implementation == "nsa").distinct()
    with store.session() as session:
        assert sorted(map(tuple, session.execute(found))) == [("measured", "triton"), ("reported", "triton")]
    assert {*queries.points(store, run_id).implementation} == {"nsa", "dense"}


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"origin": "reported"}, ["seeds"]),
        ({"origin": Origin.MEASURED}, [RUN]),
        ({"kind": "scaling"}, [RUN]),
        ({"state": "running"}, []),
        ({"text": "REPORT_"}, ["seeds"]),
        ({"text": "100%"}, []),
        ({"limit": 1}, [RUN]),
        ({"commit": "ccCC"}, [RUN]),
        ({"tag": "best"}, ["seeds"]),
        ({"tag": "bes"}, []),
        ({"card": "h200"}, [RUN]),
        ({"person": "ad"}, []),
        ({"since": datetime(2026, 1, 1, tzinfo=UTC)}, [RUN]),
        ({"until": datetime(2026, 1, 1, tzinfo=UTC)}, ["seeds"]),
        ({"run_ids": ["seeds", "other"]}, ["seeds"]),
    ],
)
def test_runs_are_filtered(filled: Store, filters: dict, found: list[str]):
    assert queries.runs(filled, **filters).run_id.tolist() == found


@pytest.mark.parametrize(
    ("lengths", "ends", "answers", "state", "words"),
    [
        ((512,), ["hang"], (), "done", "done, 1 of 2 failed"),
        ((), ["hang", "oom"], (), "failed", "failed"),
        ((), ["hang", "skipped"], (), "failed", "failed"),
        ((), ["skipped"], (), "done", "done"),
        ((512,), ["oom"], ("crash", "oom"), "done", "done"),
        ((512,), ["hang"], ("oom",), "done", "done, 1 of 2 failed"),
    ],
)
def test_the_state_of_a_run_says_what_happened(store: Store, sweep, lengths, ends, answers, state, words):
    records = sweep(laws={"chunked": 1.0}, lengths=lengths, failures={PointState(end): "why" for end in ends})
    update = {"answers": tuple(map(PointState, answers))}
    store.apply_many([r.model_copy(update=update) if isinstance(r, PointRecord) else r for r in records])
    [run] = queries.runs(store, state=state).to_dict("records")
    assert (run["state"], run_in_words(run)) == (state, words)
    with store.session() as session:
        assert session.scalars(select(v_runs.c.state)).all() == [state]


def test_scaling_has_only_ok_points_and_divides_by_the_batch(filled: Store):
    frame = queries.scaling(filled)
    assert " ".join(frame.columns) == SCALING
    assert set(frame.state) == {"ok"}
    measured = queries.scaling(filled, origin="measured")
    assert set(measured.run_id) == {RUN}
    assert len(measured) == 8 * 3  # time, memory, throughput; the oracle's error is not plotted against S
    rows = measured[(measured.implementation == "naive") & (measured.seq_len == 1024)].set_index("metric")
    assert rows.loc["time", "value"] == 8.0
    assert rows.loc["time", "per_sequence"] == 4.0
    assert rows.loc["throughput", "per_sequence"] == rows.loc["throughput", "value"]
    assert queries.scaling(filled, run_ids=["seeds"]).value.tolist() == [5165.0]
    assert queries.scaling(filled, run_ids=[]).empty


def test_an_empty_store_gives_empty_frames_with_the_same_columns(store: Store):
    assert queries.runs(store).empty
    assert " ".join(queries.scaling(store).columns) == SCALING
    assert queries.points(store, RUN).empty
    assert queries.counts(store)["runs"] == 0


def test_the_documented_queries_run(filled: Store):
    examples = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(examples) == 10
    with filled.engine.connect() as connection:
        rows = [connection.execute(text(example)).all() for example in examples]
    assert [len(found) for found in rows] == [8, 2, 0, 0, 0, 0, 0, 0, 1, 1]
