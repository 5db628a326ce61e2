"""Training on several ranks: real processes, with gloo on CPUs."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from trainings import EARLY, Keeping, by_name, small, trains_alike
from travelling import CPU, travelled
from warm_ranks import WarmRanks

from jobs.diagnosis.rank_state import RankState
from jobs.schema.point import FAILURE_FILES, Measurement
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from jobs.train import QUANTITIES, Spec, measure
from jobs.training.case import learning_rate
from jobs.training.data.corpus import load_bytes
from jobs.training.errors import Diverged
from nsa_core.model import PRESETS, NSATransformer
from orchestrator.execute.supervisor import Assignment, Conditions, supervise
from orchestrator.store.records import ArtifactRecord, OutcomeRecord, Progress, SeriesRecord


def _spec(text: Path, **changes: Any) -> Spec:
    return Spec.model_validate(small(text, batch=8) | changes)


def _train(spec: Spec, beat: Callable[..., None] = lambda *_: None) -> Measurement:
    return measure(travelled(spec.points(CPU)[0]), beat)


def test_several_ranks_are_an_axis_and_get_a_gpu_or_a_share_of_the_cores_each(text: Path) -> None:
    two = {"ranks": 2, "batch": 8, "micro_batch": 2}
    spec = _spec(text, **two, resources={"num_cpus": 4})
    (point,) = spec.points(CPU)
    assert point.axes.more["ranks"] == 2
    assert "2 ranks ddp" in point.label
    assert travelled(point).threads == 2
    assert travelled(point).layout.accumulation == 2
    assert _spec(text, **two, device="cuda").resources.num_gpus == 2
    assert _spec(text, **two, device="cuda").model_dump()["ranks"] == 2
    (point,) = _spec(text, ranks=4, batch=8, context_parallel=2, resources={"num_cpus": 4}).points(CPU)
    assert point.axes.more["context_parallel"] == 2
    assert "4 ranks ddp context 2" in point.label
    assert travelled(point).layout.micro_batch == 4


# The same training


def _written_out(text: Path, steps: int) -> Iterator[float]:
    """Losses of the training of `_spec(text)` on one process, written as plainly as can be."""
    batches = load_bytes(_spec(text).data, 8, 32, 0).batches
    torch.manual_seed(0)
    model = NSATransformer(PRESETS["tiny"]).train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    spec = _spec(text).optimizer
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step, steps)
        loss = model(*next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def test_one_rank_trains_bit_by_bit_as_a_plain_loop_does(text: Path) -> None:
    assert by_name(_train(_spec(text)))["loss"].samples == tuple(_written_out(text, 8))


def test_accumulated_passes_train_as_one_does(text: Path) -> None:
    whole, parts = (by_name(_train(_spec(text, micro_batch=size))) for size in (8, 2))
    trains_alike(parts["loss"].samples, whole["loss"].samples)
    assert parts["peak_memory"].value < 0.6 * whole["peak_memory"].value
    assert abs(parts["estimate_error"].value) < 10


@pytest.fixture(scope="module")
def one_rank(text: Path) -> tuple[Measurement, Keeping]:
    """The training of `_spec(text)` on one rank, and what it reported."""
    reported = Keeping()
    return _train(_spec(text), reported), reported


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"micro_batch": 2}, 1e-5),
        ({"gradient_compression": "bf16", "bucket_mb": 0.05}, 1e-2),
        ({"parallel": "replicate", "micro_batch": 2}, 1e-5),
        ({"parallel": "fsdp", "micro_batch": 2, "checkpointing": True}, 1e-5),
        ({"context_parallel": 2, "micro_batch": 4}, 1e-5),
    ],
    ids=["ddp", "ddp-compressed", "replicate", "fsdp", "context"],
)
def test_two_ranks_train_as_one_does(
    text: Path,
    one_rank: tuple[Measurement, Keeping],
    two_warm_ranks: WarmRanks,
    changes: dict[str, Any],
    tolerance: float,
) -> None:
    reporter = Keeping(launcher=two_warm_ranks)
    two = _train(_spec(text, ranks=2, **changes), reporter)
    assert reporter.warnings == []
    kept, started, series, phases = reporter.kept, reporter.started, reporter.by_rank, reporter.phases
    states = {name: RankState.from_json(content) for name, content in kept.items()}
    assert {name: state and state.rank for name, state in states.items()} == {"rank0.json": 0, "rank1.json": 1}
    assert started == [[state.pid for _, state in sorted(states.items()) if state]], "by rank"
    found, alone = by_name(two), by_name(one_rank[0])
    losses, expected = found["loss"].samples, alone["loss"].samples
    trains_alike(losses, expected, tolerance)
    # Adam and clipping hide a gradient that is a sum instead of a mean; its norm does not.
    norm = one_rank[1].series["gradient_norm"][1]
    assert series["gradient_norm", 0][1] == pytest.approx(norm, rel=tolerance)
    if "gradient_compression" in changes:
        assert losses[:EARLY] != pytest.approx(expected[:EARLY], rel=1e-6), "bf16 rounds"
    assert found["throughput"].value == pytest.approx(8 * 32 / found["time"].value * 1000, rel=0.2)
    assert len(found["rank_step_time"].samples) == 2
    assert found["peak_memory"].value < alone["peak_memory"].value, "of a rank, which has half of the activations"
    assert {metric.name for metric in two.metrics} <= {quantity.name for quantity in QUANTITIES}
    assert two.environment["training"]["ranks"]["ranks"] == 2
    assert two.environment["training"]["hosts"] == [socket.gethostname()] * 2
    assert two.environment["training"]["parameters"] == sum(
        p.numel() for p in NSATransformer(PRESETS["tiny"]).parameters()
    )
    assert list(dict.fromkeys(phases)) == ["corpus", "check", "heldout loss before", "heldout loss", "train", "memory"]
    reported = ("loss", 0), ("gradient_norm", 0), ("training_memory", 1)
    assert [max(series[one]) for one in reported] == [8, 8, 8]
    assert ("loss", 1) not in series, "it is the same"
    assert ("estimate_error" in found) == (changes.get("parallel") != "fsdp" and "context_parallel" not in changes)
    if changes.get("parallel") == "fsdp":
        assert {name for name, _ in series}.isdisjoint({"rank_compute_time", "rank_imbalance"})
        return
    if "estimate_error" in found:
        assert abs(found["estimate_error"].value) < 10
    assert max(series["rank_compute_time", 1]) == max(series["rank_imbalance", 0]) == 8
    compute = found["rank_compute_time"].samples
    assert len(compute) == 2
    assert min(compute) > 0
    assert found["rank_imbalance"].value == pytest.approx(100 * (2 * max(compute) / sum(compute) - 1))


# When it goes wrong


def test_a_loss_that_is_not_a_number_ends_all_ranks_at_one_step(text: Path, two_warm_ranks: WarmRanks) -> None:
    wild = _spec(text, ranks=2, optimizer={"warmup_steps": 0, "learning_rate": 1e30, "grad_clip": 1e30})
    with pytest.raises(Diverged, match=r"^loss (nan|inf) at step \d+; lower optimizer\.learning_rate$"):
        _train(wild, Keeping(launcher=two_warm_ranks))


def test_a_stalled_rank_is_a_hang_with_the_stacks_of_all_and_a_slow_one_is_not(
    text: Path, tmp_path: Path, started_ranks: Callable[[], list[psutil.Process]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: time.sleep(10**6))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    point = _spec(text, ranks=2, steps=10**6).points(CPU)[0]
    deadlines = Deadlines(startup_s=120, heartbeat_s=12, point_s=200)
    conditions = Conditions("cpu", deadlines, None, 1, False, store=f"file://{tmp_path}/store")
    seen: list[Any] = []
    recorded: list[str] = []

    def series() -> list[SeriesRecord]:
        return [record for update in list(seen) if isinstance(update, tuple) for record in update]

    def stall() -> None:
        ranks = started_ranks()
        ranks[1].suspend()
        time.sleep(3)
        ranks[1].resume()  # it was slow
        before = len(seen)
        while len(seen) < before + 2 or not any(record.name == "rank_imbalance" for record in series()):
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGUSR2)  # now it sleeps for ever
        while ranks[0].is_running():
            with contextlib.suppress(FileNotFoundError):  # the folder is removed after the point
                for path in tmp_path.glob(f"tmp/**/{FAILURE_FILES}/flight-recorder-rank0.json"):
                    recorded[:] = [path.read_text()]
            time.sleep(0.2)

    thread = threading.Thread(target=stall, daemon=True)
    for update in supervise([Assignment("r", "r/0", 1, point)], conditions):
        seen.append(update)
        if isinstance(update, Progress) and update.phase == "train" and not thread.ident:
            thread.start()
    (outcome,) = [update for update in seen if isinstance(update, OutcomeRecord)]
    assert thread.ident, outcome
    thread.join(timeout=30)
    assert outcome.state is PointState.HANG
    assert outcome.reason == "no progress for 12 s (last in phase 'train')"
    paths = {u.artifact.name: tmp_path / "store" / u.artifact.path for u in seen if isinstance(u, ArtifactRecord)}
    for rank in (0, 1):
        mine = {record.name: record.values for record in series() if record.rank == rank}
        assert 100 < mine["resident_memory"][-1] < 1000, "of one process"
        assert {"training_memory", "rank_compute_time"} <= mine.keys()
    assert mine["cpu_utilization"][-1] < 10, "the stalled rank"
    stacks = paths["stacks.txt"].read_text()
    assert '"rank 0"' in stacks
    assert '"rank 1"' in stacks
    written = paths["stderr.txt"].read_text()  # where py-spy may not attach
    assert re.search(r"^\[rank 0\].*loop\.py", written, re.MULTILINE)
    assert re.search(r"^\[rank 1\].*sitecustomize\.py", written, re.MULTILINE)
    assert "all_reduce" in recorded[0], "the collective that waits for the stalled rank"
