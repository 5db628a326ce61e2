"""Comparison of runs and commits: few false alarms, small slowdowns found, unlike cells never divided.

History of cells: what the committed journals say, a planted slowdown, a creeping one, and what looks like one.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import attempt, planned
from nsa_command import nsa

from jobs.schema.quantities import Better
from jobs.schema.states import PointState, RunState
from orchestrator.cli.commands import reference_data
from orchestrator.report.compare import Change, Compared, Measured, Samples, Side, compare, judged, paired
from orchestrator.report.history import History, histories
from orchestrator.store import Store, importer
from orchestrator.store.journal import read
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, Record, RunEndRecord, RunRecord

CELLS = 24
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
AT = datetime(2026, 11, 20, tzinfo=UTC)


def samples(random: np.random.Generator, number: int = 20) -> Samples:
    """Times of a process: 0.4 % apart, now and then an outlier, and a level of the process's own."""
    level = random.normal(0, 0.002)
    return np.asarray(np.exp(level + random.normal(0, 0.004, number)) + (random.random(number) < 0.05) * 0.3, float)


def changes(random: np.random.Generator, slower: int = 0, number: int = 20) -> list[Change]:
    """The changes of 24 cells of which so many got 3 % slower."""

    def measured(factor: float = 1.0) -> Measured:
        return Measured("r/0", factor * samples(random, number), H200, "")

    pairs = [paired((), measured(), measured(1.03 if cell < slower else 1.0), 0.02) for cell in range(CELLS)]
    return [cell.change for cell in judged(pairs, Better.LOWER)]


def test_repeats_of_a_commit_raise_no_alarm_and_a_slowdown_of_3_percent_is_found() -> None:
    random = np.random.default_rng(7)
    again = [change for _ in range(20) for change in changes(random)]
    assert sum(change in (Change.WORSE, Change.BETTER) for change in again) <= 0.01 * len(again)
    assert again.count(Change.SAME) > 0.9 * len(again)
    found = [change for _ in range(20) for change in changes(random, slower=3)[:3]]
    assert found.count(Change.WORSE) >= 0.95 * len(found)


def one(first: Samples, other: Samples, better: Better = Better.LOWER, **unlike: str) -> Compared:
    sides = [Measured("r/0", each, H200, "cmp triton") for each in (first, other)]
    [cell] = judged(
        [paired((), sides[0], Measured("r/1", other, **{"gpu": H200, "route": "cmp triton"} | unlike), 0.02)], better
    )
    return cell


def test_a_ratio_has_a_direction_and_an_interval() -> None:
    before = samples(np.random.default_rng(7))
    slower = one(before, 1.1 * before)
    assert slower.low < slower.ratio < slower.high
    assert slower.ratio == pytest.approx(1.1, rel=0.01)
    assert slower.change is Change.WORSE
    assert one(before, 1.1 * before, Better.HIGHER).change is Change.BETTER
    assert one(np.array([512.0]), np.array([512.0])).change is Change.SAME, "one exact value, as of memory"


def test_unlike_cards_are_not_divided_and_another_route_is_named() -> None:
    before = samples(np.random.default_rng(7))
    other = one(before, before, gpu=H100)
    assert (other.change, other.note) == (Change.AMBIGUOUS, f"not divided: {H200} and {H100}")
    assert np.isnan(other.ratio)
    assert one(before, before, route="cmp chunked").note == "another route: cmp triton, then cmp chunked"


def records(run_id: str, commit: str, day: int, factors: dict[int, float], driver: str = "580") -> list[Record]:
    """A run with a point of each length, of 20 times around S x factor."""
    at = AT + timedelta(days=day)
    run: dict[str, Any] = {"run_id": run_id, "at": at}
    begin = RunRecord(**run, name="bench", kind="bench", spec={}, spec_hash="5", git_commit=commit, git_dirty=False)
    found: list[Record] = [begin]
    for number, (length, factor) in enumerate(factors.items()):
        times = tuple(factor * length * samples(np.random.default_rng(100 * day + number)))
        metric = MetricData(name="time", unit="ms", value=float(np.median(times)), samples=times)
        plan = planned(run_id, number, "triton", length, at, {"pass_": "forward"})
        environment = {"gpu": {"name": H200, "driver": driver}}
        found += attempt(plan, at, 1, PointState.OK, metrics=(metric,), environment=environment)
    return [*found, RunEndRecord(**run, state=RunState.DONE)]


def test_runs_of_one_commit_set_the_noise_floor_of_a_cell(sqlite_store: Store) -> None:
    sqlite_store.apply_many(records("a", "c" * 40, 0, {2048: 1.0, 8192: 1.0, 512: 1.0}))
    sqlite_store.apply_many(records("b", "c" * 40, 1, {2048: 1.15, 8192: 1.0}))
    sqlite_store.apply_many(records("new", "d" * 40, 2, {2048: 1.12, 8192: 1.12, 99: 1.0}, driver="590"))
    [found] = compare(sqlite_store, Side("a", ("a",)), [Side("new", ("new",))])
    judged = {dict(cell.cell)["seq_len"]: cell.change for cell in found.cells}
    assert judged == {"2048": Change.SAME, "8192": Change.WORSE}, "2,048 has been 15 % apart without a change"
    assert found.missing == {"a": {"not planned": 1}, "new": {"not planned": 1}}
    assert found.differences == {"commit": ("c" * 40, "d" * 40), "gpu.driver": ("580", "590")}


def test_memory_is_judged_by_one_value_as_equal_calls_repeat_it(sqlite_store: Store) -> None:
    for run_id, level in (("a", 1000.0), ("new", 2000.0)):
        metric = MetricData(name="peak_memory", unit="MiB", value=level)
        made = records(run_id, run_id * 3, len(run_id), {2048: 1.0})
        made[3] = made[3].model_copy(update={"metrics": (metric,)})
        sqlite_store.apply_many(made)
    [found] = compare(sqlite_store, Side("a", ("a",)), [Side("new", ("new",))], "peak_memory")
    assert [cell.change for cell in found.cells] == [Change.WORSE]


def test_turns_are_pooled_and_no_closer_than_they_are_to_one_another(sqlite_store: Store) -> None:
    for day, (run_id, level) in enumerate((("a1", 1.0), ("b1", 1.03), ("a2", 1.0), ("b2", 1.04), ("b3", 1.12))):
        commit = run_id[0] * 40
        sqlite_store.apply_many(records(run_id, commit, day, {2048: level, 8192: 1.0 + 0.05 * (commit > "b")}))
    [found] = compare(sqlite_store, Side("a", ("a1", "a2"), pooled=True), [Side("b", ("b1", "b2", "b3"), pooled=True)])
    cells = {dict(cell.cell)["seq_len"]: cell for cell in found.cells}
    assert (cells["8192"].change, cells["8192"].first.samples.size) == (Change.WORSE, 40)
    assert cells["2048"].change is not Change.WORSE, "the turns of one side are 9 % apart"
    [newest] = compare(sqlite_store, Side("a", ("a1", "a2")), [Side("b", ("b1", "b2"))])
    assert newest.cells[0].first.samples.size == 20, "runs of a commit are not pooled"


def test_a_commit_is_compared_by_a_command(
    sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_store.apply_many(records("a", "c" * 40, 0, {2048: 1.0, 8192: 1.0}))
    sqlite_store.apply_many(records("new", "d" * 40, 2, {2048: 1.0, 8192: 1.05}))
    monkeypatch.setenv("NSA_DATABASE_URL", f"sqlite:///{tmp_path / 'nsa.db'}")
    done = nsa("compare", "ccccccc", "ddddddd", "--format", "md")
    assert done.code == 1
    assert "2 cells: 1 slower, 1 same; mean ratios: NSA (Triton) 1.02" in done.out
    assert "| nsa | forward | 12/2 d64 | 8192 |" in done.out
    assert nsa("compare", "a", "a").code == 0
    sqlite_store.apply_many(records("other", "e" * 40, 2, {512: 1.0}))
    assert nsa("compare", "a", "other").code == 3, "no cell in common"
    nsa("label", "a", "--tag", "baseline")
    assert "new after a" in nsa("compare", "baseline", "new", "--format", "md").out
    assert nsa("compare", "a", "new", "--metric", "nonsense").err.startswith(
        "error: --metric: 'nonsense': a has no posit"
    )


def test_a_cell_that_no_longer_runs_is_listed_with_its_state_and_fails(
    sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_store.apply_many(records("a", "c" * 40, 0, {512: 1.0, 2048: 1.0, 8192: 1.0, 9999: 1.0}))
    failed: list[Record] = []
    for record in records("new", "d" * 40, 2, {512: 1.0, 2048: 1.0, 8192: 1.0}):
        ends = {"new/1": PointState.OOM, "new/2": PointState.SKIPPED}.get(getattr(record, "point_id", ""))
        if ends and isinstance(record, OutcomeRecord):
            record = record.model_copy(update={"state": ends, "metrics": ()})
        failed.append(record)
    sqlite_store.apply_many(failed)
    monkeypatch.setenv("NSA_DATABASE_URL", f"sqlite:///{tmp_path / 'nsa.db'}")
    done = nsa("compare", "a", "new", "--format", "md")
    assert done.code == 1
    assert "3 cells: 1 failed, 1 same, 1 lacking; mean ratios: NSA (Triton) 1.0" in done.out
    assert "; new lacks 1 cells (1 not planned)" in done.out
    results = [line.split("|")[-2].strip() for line in done.out.splitlines() if line.startswith("| nsa")]
    assert results == ["failed; oom", "same", "lacking; skipped"]


JOURNALS = {path.name.removesuffix(".jsonl.gz"): path for path in reference_data() if path.name.endswith(".jsonl.gz")}
FIRST, EXACT, SLOW, LAST = (
    next(path for name, path in JOURNALS.items() if name.endswith(end)) for end in ("90ba", "3582", "9edf", "cf10")
)
SLOWER, CREEPING = {"query_heads": 32, "seq_len": 8192}, {"query_heads": 64, "seq_len": 2048}


@pytest.fixture
def reference(sqlite_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A database of four committed runs: three commits, the second also with exact slots."""
    for path in (FIRST, EXACT, SLOW, LAST):
        importer.import_file(sqlite_store, path)
    monkeypatch.setenv("NSA_DATABASE_URL", f"sqlite:///{tmp_path / 'nsa.db'}")
    return sqlite_store


def test_the_committed_runs_have_the_change_that_is_in_them_and_its_doubts(reference: Store) -> None:
    found = histories(reference, words=("nsa", "forward", "12/2", "2048", "slots=packed"))
    assert [[reading.commit for reading in each.readings] for each in found] == [["f176e3e", "45fd17d", "535d8e5"]]
    slower, faster = found[0].changes
    assert (slower.before.commit, slower.after.commit, slower.change) == ("f176e3e", "45fd17d", Change.WORSE)
    assert slower.ratio == pytest.approx(1.109, abs=0.001)
    said = "may be noise: 1 run before it and 2 after, its best tenth did not change, 535d8e5 took it back"
    assert slower.doubt == said
    assert faster.doubt.endswith("f176e3e had it before")


def test_a_command_lists_the_changes_and_the_readings_of_few_cells(reference: Store) -> None:
    done = nsa("history", "triton", "forward", "12/2", "2048", "--format", "md")
    assert done.code == 0
    assert "| 12/2 d64, slots=packed | 2048 | 16 | 0.8302 ms (f176e3e) | 0.9301 ms (45fd17d) | 1.109 |" in done.out
    assert "| 2026-11-25 13:54 UTC | 45fd17d | 20261125-135408-bench-9edf | 0.9301 ms |" in done.out
    compare = "nsa compare 20261125-135408-bench-9edf 20261128-134541-bench-cf10 --metric time"
    assert compare in done.out, "its newest change"
    assert nsa("history", "triton", "nonsense").err.startswith("error: WORDS: 'triton nonsense': no cell ")
    assert nsa("history", "triton", "--metric", "nonsense").err.startswith("error: --metric: 'nonsense': no cell ")


def planted(path: Path, run: int, random: np.random.Generator) -> Iterator[Record]:
    """A journal's records of Triton as those of a later run, 0.4 % off; from the seventh run on one shape is 3 %
    slower, another one gets 0.7 % slower with each run; the driver changes with the fourth."""
    names: dict[str, float] = {}
    for record in read(path):
        ids: dict[str, Any] = {"run_id": f"run-{run}", "at": record.at + timedelta(days=run)}
        if point_id := getattr(record, "point_id", None):
            ids["point_id"] = point_id.replace(record.run_id, f"run-{run}")
        if isinstance(record, RunRecord):
            yield record.model_copy(update=ids | {"git_commit": f"{run:x}" * 40, "git_dirty": False})
        elif isinstance(record, PointRecord) and record.axes["implementation"] == "triton":
            factor = np.exp(random.normal(0, 0.004))
            is_slower = run >= 6 and all(record.axes[axis] == value for axis, value in SLOWER.items())
            creeps = all(record.axes[axis] == value for axis, value in CREEPING.items())
            names[record.point_id] = factor * (1.03 if is_slower else 1.007**run if creeps else 1.0)
            yield record.model_copy(update=ids)
        elif isinstance(record, OutcomeRecord) and record.point_id in names:
            times = [metric.samples[:40] for metric in record.metrics if metric.name == "time"]
            values = tuple(names[record.point_id] * each for samples in times for each in samples)
            median = (
                [MetricData(name="time", unit="ms", value=float(np.median(values)), samples=values)] if values else []
            )
            gpu = dict(record.environment["gpu"]) | {"driver": "580" if run < 3 else "590"}
            yield record.model_copy(
                update=ids | {"metrics": (*median,), "environment": {**record.environment, "gpu": gpu}}
            )
        elif isinstance(record, RunEndRecord):
            yield record.model_copy(update=ids)


def test_a_planted_slowdown_of_3_percent_and_a_creeping_one_are_found_and_nothing_else(sqlite_store: Store) -> None:
    random = np.random.default_rng(7)
    for run in range(10):
        sqlite_store.apply_many(list(planted(FIRST, run, random)))
    found = histories(sqlite_store, words=("forward",))
    changed = [each for each in found if any(not change.doubt for change in each.changes)]
    assert len(found) > 10
    assert {shape(each) for each in changed} == {(32, 8192), (64, 2048)}
    [step], [slow] = (each.changes for each in sorted(changed, key=shape))
    assert (step.before.run_id, step.after.run_id, step.change) == ("run-5", "run-6", Change.WORSE)
    assert step.ratio == pytest.approx(1.03, abs=0.006)
    assert slow.creeping
    assert (slow.before.run_id, slow.after.run_id) == ("run-0", "run-9")
    tools = [reading.tools["driver"] for reading in changed[0].readings]
    assert tools == ["580"] * 3 + ["590"] * 7


def shape(history: History) -> tuple[int, int]:
    values = dict(history.cell)
    return int(values["query_heads"]), int(values["seq_len"])
