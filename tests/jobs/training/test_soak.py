"""A soak: its slopes, its pieces in real processes, its alert and its limit."""

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import descendants
from trainings import Keeping, by_name, of_the_kill, small
from travelling import CPU, travelled
from warm_ranks import WarmRanks

from jobs.hardware.stats import common_slope
from jobs.schema.point import STARTING, Measurement
from jobs.soak import QUANTITIES, Spec, compare_ranks, measure, memory
from jobs.training.checkpoints.folder import CheckpointError
from jobs.training.errors import MemoryLimit
from jobs.training.rank import train_rank
from jobs.training.soak import INTERVALS, Interval, SoakHistory, SoakPlan, SoakWatch

TAME = {"warmup_steps": 3, "learning_rate": 1e-3}  # so that what is rounded stays small for hundreds of steps


def _data(text: Path, **changes: Any) -> dict[str, Any]:
    own = {"kind": "soak", "optimizer": TAME, "minutes": 0.06, "piece_minutes": 0.03, "checkpoints": {"every": 20}}
    return small(text, steps=5000) | own | changes


class Killing(Keeping):
    """A Reporter that kills the newest rank, once the soak has done some steps."""

    killed = False

    def sample(self, step: int, values: dict[str, float], rank: int = 0) -> None:
        super().sample(step, values, rank)
        if step >= 7 and not self.killed:
            self.killed = True
            descendants(psutil.Process(), "spawn_main")[-1].kill()


def _soak(text: Path, watching: Keeping, **changes: Any) -> Measurement:
    spec = Spec.model_validate(_data(text, **changes))
    return measure(travelled(spec.points(CPU)[0]), watching)


def _rows(result: Measurement) -> list[dict[str, float]]:
    table = result.files["soak.csv"]
    assert isinstance(table, str)
    header, *lines = table.splitlines()
    return [dict(zip(header.split(","), map(float, line.split(",")), strict=True)) for line in lines]


def test_the_slope_is_that_of_the_pieces_and_its_interval_widens_with_readings_alike_in_a_row() -> None:
    """Three pieces of ten minutes, each at a level of its own that falls."""
    pieces = [piece for piece in range(3) for _ in range(100)]
    hours = [(600 * piece + 6 * (number % 100)) / 3600 for number, piece in enumerate(pieces)]
    generator, level, widths = random.Random(0), 0.0, []
    for kept in (0.0, 0.8):
        readings = []
        for piece, hour in zip(pieces, hours, strict=True):
            level = kept * level + generator.gauss(0, (1 - kept**2) ** 0.5)
            readings.append(5000 - 300 * piece + 12 * hour + level)
        found = common_slope(pieces, hours, readings)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert kept or found.low < 12 < found.high
        widths.append(found.high - found.low)
    assert 4 < widths[0] < 8, "as the noise has it: about 4 x 1 MiB / (sqrt(300) x 0.048 h)"
    assert widths[1] > 2 * widths[0]
    assert common_slope([0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 2, 3]) is None, "too few"


# The history


def _watch(
    plan: SoakPlan,
    history: SoakHistory,
    told: Any = lambda *_: None,
    utilization: Callable[[], float | None] = lambda: None,
) -> SoakWatch:
    watch = SoakWatch(plan, history, torch.device("cpu"), 0, told, utilization)
    watch.begin(history.pieces)
    return watch


def test_hours_of_steps_are_kept_in_a_bounded_history() -> None:
    plan, history, step = SoakPlan(60, 20, 60, 65), SoakHistory(), 0
    while not history.done:
        watch = _watch(plan, history)
        while not watch.over:
            step += 1
            watch.add(step, 2.0, 0.1, history.elapsed_s, 70.0)
    assert history.pieces == 3
    assert history.elapsed_s == pytest.approx(3600, abs=1)
    assert INTERVALS * 0.9 < len(history.intervals) <= INTERVALS + 3
    assert sum(interval.steps for interval in history.intervals) == step
    assert sum(interval.loss for interval in history.intervals) == 2.0 * step
    assert sum(interval.compute_ms for interval in history.intervals) == 70.0 * step
    warm = {interval.process: interval.end_s - interval.seconds for interval in reversed([*history.settled(plan)])}
    assert [warm[piece] - 1200 * piece for piece in range(3)] == pytest.approx([60, 60, 60], abs=plan.interval_s + 1)


def test_an_interval_that_a_checkpoint_ends_has_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes between two looks: a first one begins another level, a later one may be the last of all."""
    looks: list[tuple[int, int, int, int]] = []

    def look(device: torch.device) -> tuple[int, int, int, int]:
        looks.append((0, 0, 0, 10**9))
        return looks[-1]

    monkeypatch.setattr("jobs.training.soak._memory", look)
    plan = SoakPlan(10, 10, 60, 65)
    for cut in range(700, 720):
        told, history = Keeping(tmp_path), SoakHistory()
        looks.clear()
        watch = _watch(plan, history, told)
        for step in range(1, 800):
            watch.add(step, 2.0, 0.1, history.elapsed_s)
            if step in (cut, cut + 35):
                watch.note_checkpoint()
                assert {interval.held for interval in history.settled(plan)} == {10**9}
        saved = [interval.checkpoints for interval in history.intervals]
        assert saved == sorted(saved)
        assert set(saved) == {0, 1, 2}
        assert len(told.series["host_memory"]) == len(looks), "no step has two"


def test_an_alert_is_told_once_and_its_time_counted_and_a_limit_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = 59.0
    monkeypatch.setattr("jobs.training.soak._memory", lambda device: (0, int(held * 1e9), 0, 10**9))
    told, history = Keeping(tmp_path), SoakHistory()
    watch = _watch(SoakPlan(60, 20, 60, 65), history, told)
    for step in range(1, 1201):
        held = 59.0 if step <= 600 else 61.0
        watch.add(step, 2.0, 0.5, history.elapsed_s)
    assert told.warnings == [
        "rank 0 holds 61 GB, more than alert_gb: 60, after 5.02 min and 602 steps, in process 1; after the first "
        "warm-up it held 59 GB"
    ]
    assert history.alert_s == pytest.approx(300, abs=1)
    again = _watch(SoakPlan(60, 20, 60, 65), history, told)
    again.add(1201, 2.0, 1.0, history.elapsed_s)
    assert len(told.warnings) == 1, "the next process knows"
    held = 65.5
    with pytest.raises(MemoryLimit, match=r"^rank 0 holds 65\.5 GB, more than limit_gb: 65, after 10 min and 1,202 st"):
        again.add(1202, 2.0, 1.0, history.elapsed_s)


def _history(compute_ms: float | None, busy: float | None) -> SoakHistory:
    """History of a rank, with one settled interval of ten steps of 100 ms."""
    looked = {} if busy is None else {"busy": 2 * busy, "looks": 2}
    interval = Interval(0, 60, 10, 10, 1.0, warm=True, compute_ms=10 * (compute_ms or 0), **looked)
    return SoakHistory(intervals=[interval])


def test_the_ranks_of_a_soak_are_compared() -> None:
    plan = SoakPlan(16, 16, 60, 65)
    found = {m.name: m for m in compare_ranks([_history(50, 80), _history(70, 90)], plan)}
    assert found["rank_imbalance"].value == pytest.approx(100 * (70 / 60 - 1))
    assert found["rank_compute_time"].samples == (50, 70)
    assert found["rank_step_time"].samples == (100, 100)
    assert (found["rank_utilization"].value, found["rank_utilization"].samples) == (80, (80, 90))
    unknown = compare_ranks([_history(None, 80), _history(None, None)], plan)  # FSDP2; a GPU without NVML
    assert [metric.name for metric in unknown] == ["rank_step_time"]
    assert compare_ranks([_history(50, 80)], plan) == []
    rows = [row.split(",")[-1] for each in (_history(50, 80), _history(50, None)) for row in each.to_csv().splitlines()]
    assert rows == ["busy", "80.0", "busy", "nan"]


# Real processes


def test_two_pieces_of_two_ranks_keep_one_history(text: Path, tmp_path: Path, two_warm_ranks: WarmRanks) -> None:
    watching = Keeping(tmp_path, launcher=two_warm_ranks)
    result = _soak(text, watching, ranks=2)
    assert watching.phases.count(STARTING) == 1, "imports of the second process are no stall"
    assert watching.phases[watching.phases.index(STARTING) + 1] == "corpus"
    found, rows = by_name(result), _rows(result)
    assert found["pieces"].value == 2
    assert found["interruptions"].value == found["restarts"].value == found["alert_time"].value == 0
    (warning,) = watching.warnings
    assert "piece_minutes: 0.03: gives 2 process(es), and growth of memory is judged over 3" in warning
    assert {row["process"] for row in rows} == {0, 1}
    (resumed,) = result.environment["training"]["resumed_from"]
    assert [row["end_step"] for row in rows if row["process"] == 0][-1] == resumed
    assert rows[-1]["end_step"] == sum(row["steps"] for row in rows)
    assert 3600 * found["soak_time"].value >= 3.6
    assert {"throughput_drift", "memory_held"} <= set(found)
    assert "host_growth" not in found, "two processes"
    assert found["throughput"].value == pytest.approx(4 * 32 / found["time"].value * 1000, rel=0.2)
    assert {metric.name for metric in result.metrics} <= {quantity.name for quantity in QUANTITIES}
    assert set(watching.series) <= {quantity.name for quantity in QUANTITIES}
    compute = found["rank_compute_time"].samples
    assert len(compute) == len(found["rank_step_time"].samples) == 2
    assert 0 < max(compute) < 1.5 * found["rank_step_time"].value
    assert found["rank_imbalance"].value == pytest.approx(100 * (2 * max(compute) / sum(compute) - 1))
    assert watching.series["rank_imbalance"]
    assert "rank_utilization" not in found, "a CPU has no such counter"
    assert all(row["compute_ms"] > 0 for row in rows)


def test_a_killed_rank_interrupts_and_costs_only_what_no_checkpoint_has(text: Path, tmp_path: Path) -> None:
    watching = Killing(tmp_path)
    result = _soak(text, watching, piece_minutes=0.06, restarts=1, checkpoints={"every": 5})
    restart = "of 1 was killed by SIGKILL; restart 1 of 1 of all ranks from the last checkpoint"
    assert restart in of_the_kill(watching.warnings[1:])  # the first is of the pieces
    found, rows = by_name(result), _rows(result)
    assert [found[name].value for name in ("pieces", "interruptions", "restarts")] == [1, 1, 1]
    assert result.environment["training"]["restarts"] == 1
    assert rows[-1]["end_step"] == sum(row["steps"] for row in rows)
    assert found["resumed_step"].value >= 5


def test_a_point_has_time_for_its_soak_and_a_resumed_one_is_the_same(text: Path) -> None:
    spec = Spec.model_validate(_data(text, minutes=180, piece_minutes=30))
    assert spec.deadlines.point_s > 1.5 * 180 * 60
    again = Spec.model_validate(json.loads(json.dumps(spec.model_dump(mode="json"))))
    keys = [each.points(CPU)[0].key("code", CPU) for each in (spec, again)]
    assert keys[0] == keys[1]
    (point,) = spec.points(CPU)
    assert (point.kind, point.axes.more["minutes"], spec.keeps_checkpoints) == ("soak", 180, True)


def test_a_piece_that_could_save_nothing_ends_the_soak(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its processes would train the same steps for ever."""
    case = travelled(Spec.model_validate(_data(text, minutes=0.02, piece_minutes=0.01)).points(CPU)[0])

    def full(*_: object, **__: object) -> None:
        raise OSError("full")

    monkeypatch.setattr("jobs.training.checkpoints.saving.Writer.finish", full)
    watching = Keeping(tmp_path)
    with pytest.raises(CheckpointError, match=r"^checkpoints: none could be saved after step 0, .*; mend the artifact"):
        train_rank(case, torch.device("cpu"), 0, watching, threading.Event())
    assert "was not saved: OSError: full" in watching.warnings[-1]


MIB = 2**20
PLAN = SoakPlan(45, 15, 60, 65)
EVERY = 320  # steps of 0.2 s: a first checkpoint comes after the warm-up
LEVEL, LOADED, FIRST_CHECKPOINT = (4200, 400, 250)  # MiB: of a process, more once it has loaded one, and saved one


def _soaked(
    plan: SoakPlan = PLAN, every: int = EVERY, step: float = 0, checkpoint: float = 0, process: float = 0
) -> SoakHistory:
    """A soak at 5 steps/s, as its watch sees it, with leaks of so many MiB a step, a checkpoint, a process."""
    history, number = SoakHistory(), 0
    while not history.done:
        begun, piece, saved = number, history.pieces, 0
        watch = _watch(plan, history)

        def held_by(device: torch.device, begun: int = begun, piece: int = piece) -> tuple[int, int, int, int]:
            level = LEVEL + LOADED * (piece > 0) + FIRST_CHECKPOINT * (saved > 0)  # noqa: B023 - as it is now
            level += step * (number - begun) + checkpoint * saved + process * piece  # noqa: B023
            held = int(level * MIB)
            return held, held, held + 500 * MIB, held

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jobs.training.soak._memory", held_by)
            while not watch.over:
                number += 1
                watch.add(number, 2.0, 0.2, history.elapsed_s)
                if number % every == 0:
                    watch.note_checkpoint()
                    saved += 1
    return history


def _growth_of(*ranks: SoakHistory, plan: SoakPlan = PLAN) -> dict[str, float]:
    return {metric.name: metric.value for metric in memory(ranks, plan) if metric.name.endswith("_growth")}


@pytest.mark.parametrize(
    ("leak", "mib_by_1000_steps"),
    [
        ({}, 0),  # what a process and its first checkpoint take is no growth
        ({"step": 1.0}, 1000),
        ({"checkpoint": 50.0}, 50_000 / EVERY),
        ({"process": 400.0}, 400 / 4.5),  # of 4,500 steps
    ],
    ids=str,
)
def test_leaks_alone_are_growth(leak: dict[str, float], mib_by_1000_steps: float) -> None:
    soaked = _soaked(**leak)
    growth = _growth_of(_soaked(), soaked)
    mean = sum(each.reserved for each in soaked.settled(PLAN)) / len(soaked.settled(PLAN)) / MIB
    by_1000_steps = {"reserved_growth": 100 / mean, "driver_growth": 100 / (mean + 500), "host_growth": 18}
    expected = {name: mib_by_1000_steps * scale for name, scale in by_1000_steps.items()}
    assert growth == pytest.approx(expected, rel=0.05, abs=0.1), "0.1 is the bound; 18,000 steps are an hour"


@pytest.mark.parametrize(("plan", "every"), [(PLAN, 1000), (SoakPlan(30, 15, 60, 65), EVERY)])
def test_without_checkpoints_and_processes_enough_no_growth_is_claimed(plan: SoakPlan, every: int) -> None:
    assert _growth_of(_soaked(plan, every), plan=plan) == {}
