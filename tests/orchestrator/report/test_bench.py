"""A bench's tables, from handmade rows and the recorded peers."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from made_up_runs import T0, attempt, planned

import orchestrator
from jobs.schema.states import PointState, RunState
from orchestrator.judge.crossover import Crossing
from orchestrator.judge.rules import load_gates
from orchestrator.report.results import cells
from orchestrator.report.template import report
from orchestrator.store import Store
from orchestrator.store.importer import import_file
from orchestrator.store.records import MetricData, Record, RunEndRecord, RunRecord

PEERS = Path(orchestrator.__file__).parent / "reference_data" / "peers_h200.csv"
RUN = "20261121-120000-bench-abcd"
FORWARD, BOTH = "forward", "forward+backward"


class Rows:
    """Builder of the records of a run of kind bench: 12/2 heads of 64 in bfloat16."""

    def __init__(self, gpu: str = "NVIDIA H200", run_id: str = RUN, commit: str | None = None) -> None:
        self.gpu, self.run_id = gpu, run_id
        spec = {"kind": "bench", "name": "bench"}
        self.records: list[Record] = [
            RunRecord(run_id=run_id, name="bench", kind="bench", spec=spec, spec_hash="5" * 16, git_commit=commit)
        ]

    def add(
        self,
        implementation: str,
        pass_: str,
        seq_len: int,
        metrics: Iterable[MetricData] = (),
        state: PointState = PointState.OK,
        kernel: str = "triton",
        env: str | None = None,
    ) -> None:
        axes = {"pass_": pass_, "batch": max(1, 32768 // seq_len), "dtype": "bfloat16", "device": "cuda", "env": env}
        label = f"12/2 d64 {implementation} {pass_} S={seq_len}"
        self.records += attempt(
            planned(self.run_id, len(self.records), implementation, seq_len, T0, axes, label=label),
            T0,
            1,
            state,
            reason=None if state is PointState.OK else "out of memory",
            metrics=tuple(metrics),
            route={"dense": kernel} if implementation.startswith("dense") else {"slc": kernel},
            environment={"gpu": {"name": self.gpu}} if state is PointState.OK else {},
        )

    def timed(
        self, implementation: str, seq_len: int, forward: float, both: float, mib: float, kernel: str, env: str = ""
    ) -> None:
        for pass_, time in ((FORWARD, forward), (BOTH, both)):
            memory = MetricData(name="peak_extra_memory", unit="MiB", value=mib if pass_ == BOTH else mib / 2)
            times = MetricData(name="time", unit="ms", value=time, method=f"events; {seq_len} samples")
            self.add(implementation, pass_, seq_len, (times, memory), kernel=kernel, env=env or None)

    def staged(self, seq_len: int, **stages: float) -> None:
        metrics = [MetricData(name=f"stage_{name}", unit="ms", value=value) for name, value in stages.items()]
        self.add("triton", BOTH, seq_len, metrics)

    def into(self, store: Store) -> None:
        store.apply_many([*self.records, RunEndRecord(run_id=self.run_id, state=RunState.DONE)])


@pytest.fixture
def rows(sqlite_store: Store) -> Rows:
    """Run at four lengths with memory linear in S, and two dense kernels, one out of memory at the longest length."""
    import_file(sqlite_store, PEERS)
    made = Rows()
    for seq_len, mib in ((8192, 640.0), (32768, 606.0), (65536, 1212.0), (131072, 2424.0)):
        made.timed("triton", seq_len, 1.0, 4.0, mib, "triton")
        made.timed("dense-flash", seq_len, 3.0, 6.0, 300.0, "sdpa-flash")
        if seq_len < 131072:
            made.timed("dense", seq_len, 2.0, 8.0, 300.0, "sdpa-cudnn")
    for pass_ in (FORWARD, BOTH):
        made.add("dense", pass_, 131072, state=PointState.OOM)
    return made


def table(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("commit", "gpu", "shown"), [
    ("1234567", "NVIDIA H200", "| 2 / 2 | - | - | 2 / 8 (sdpa-cudnn) |"),
    ("7654321", "NVIDIA H200", "| - | - | - | - |"),
    ("1234567", "NVIDIA A100", "| - | - | - | - |"),
    (None, "NVIDIA H200", "| - | - | - | - |"),
])  # fmt: skip
def test_dense_attention_of_another_run_counts_if_commit_and_card_are_the_same(
    sqlite_store: Store, commit: str | None, gpu: str, shown: str
):
    sparse, dense = Rows(commit=commit and "1234567"), Rows(gpu, "dense-alone", commit)
    sparse.timed("triton", 8192, 1.0, 4.0, 640.0, "triton")
    dense.timed("dense", 8192, 2.0, 8.0, 300.0, "sdpa-cudnn")
    for made in (sparse, dense):
        made.into(sqlite_store)
    text = report(sqlite_store, [RUN, "dense-alone"])
    assert f"| nsa | 1 | 4 | 640 {shown}" in table(text, f"Operator, {RUN}")
    assert "Operator, dense-alone" not in text  # nothing to compare
    assert "| 640 | - | - | - | - |" in table(report(sqlite_store, [RUN]), "Operator")


def test_each_line_stands_beside_the_fastest_dense_and_the_best_peer(sqlite_store: Store, rows: Rows):
    rows.into(sqlite_store)
    shown = table(report(sqlite_store, [RUN]), "Operator")
    # At 8,192 the best peer takes 2.15 / 6.616 ms and 546 MiB; dense is fastest by another kernel in each pass.
    assert (
        "| 12/2 d64 | 8,192 | 4 | nsa | 1 | 4 | 640 | 2 / 1.5 | 2.15 / 1.654 | 0.8531 "
        "| 2 / 6 (sdpa-cudnn, sdpa-flash) | 2.15 / 6.616 (Scalable-Flash-NSA, window by flash-attn-4) | 546 |"
    ) in shown
    # At 131,072 no peer was measured: no ratio and no failure.
    assert "| 131,072 | 1 | nsa | 1 | 4 | 2,424 | 3 / 1.5 | - | - | 3 / 6 (sdpa-flash) | - | - |" in shown
    assert shown.count("| 12/2 d64 |") == 4


def test_a_failed_point_shows_its_state_and_affects_no_other(sqlite_store: Store, rows: Rows):
    rows.add("triton", FORWARD, 16384, state=PointState.OOM)
    rows.add("triton", BOTH, 16384, state=PointState.OOM)
    rows.into(sqlite_store)
    text = report(sqlite_store, [RUN])
    assert "| 12/2 d64 | 16,384 | 2 | nsa | oom | oom | - | - | - | - | - | - | - |" in text
    assert "| bench | 12/2 d64 dense forward S=131072 | oom | out of memory |" in text
    assert "nan" not in text.lower()


def test_stages_are_listed_by_length_slowest_first_with_gaps(sqlite_store: Store, rows: Rows):
    rows.staged(8192, selected=2.0, window=0.5, other=0.25)
    rows.staged(131072, selected=1.0, window=2.0, brand_new=0.5)
    rows.into(sqlite_store)
    text = report(sqlite_store, [RUN])
    shown = table(text, "Stages of 12/2 d64, nsa forward+backward")
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert lines[0] == "| stage | 8,192 | 131,072 |"
    assert lines[2:] == [
        "| window | 0.5 | 2 |",
        "| selected | 2 | 1 |",
        "| brand_new | - | 0.5 |",
        "| other | 0.25 | - |",
        "| all kernels | 2.75 | 3.5 |",
        "| gaps | 1.25 | 0.5 |",
        "| call | 4 | 4 |",
    ]
    assert "| m7c-125m | 1× A100 80 GB, 2× A100 80 GB, 1× H100, 2× H100, 1× H200, 2× H200 |" in text
    assert "## Results" not in text  # would repeat the same figures
    assert "| time | Time | ms | events; 8192 samples (and 3 with other numbers) |" in text


def test_a_crossover_of_another_quantity_than_time_has_no_cells(sqlite_store: Store) -> None:
    """Own rules may ask for one."""
    place = (load_gates().hardware[0], {64: 0.5}, {64: ("run/0", "run/1")})
    assert cells(sqlite_store, [Crossing("steps", "steps of decoding", *place, None, (64, 64), None, ())]) == []
