"""`nsa bisect`: the commit of a planted slowdown, in a throwaway repository whose file says what a time is."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nsa_command import nsa

from jobs.schema.states import PointState, RunState
from orchestrator.cli import interleave
from orchestrator.cli.interleave import Sources, Turns
from orchestrator.report.compare import Side
from orchestrator.settings import PACKAGES
from orchestrator.store import Store
from orchestrator.store.records import MetricData, OutcomeRecord, PointRecord, RunEndRecord, RunRecord

FACTORS = (1.0, 1.001, 1.002, 0.0, 1.032, 1.031, 1.07)  # of the commits; the fourth measures nothing


def made_up(turns: Turns, store: Store, sources: Sequence[Sources]) -> list[Side]:
    """A run of each of the sources, of two lengths whose times the sources' file says."""
    sides = []
    for each in sources:
        factor, run_id = float((each.folder / "jobs" / "factor").read_text()), f"run-{len(store_runs)}"
        drift = 1.02 ** (len(store_runs) // len(sources))  # from one step to the next, and alike for both sides
        store_runs.append(each.name)
        run: dict[str, Any] = {"run_id": run_id}
        commit = {"git_commit": each.state.commit, "git_dirty": each.state.dirty}
        begin = RunRecord(**run, **commit, name="f", kind="f", spec={}, spec_hash="5")
        points: list[Any] = []
        for number, times in enumerate((drift * np.ones(20), drift * factor * np.ones(20)) if factor else ()):
            point = {**run, "point_id": f"{run_id}/{number}"}
            axes = {"implementation": "fake", "seq_len": 2048 * (number + 1)}
            points.append(PointRecord(**point, index=number, key=f"{number}", label="p", config={}, axes=axes))
            values = tuple(times * (1 + np.arange(20) % 7 / 2000))
            metric = MetricData(name="time", unit="ms", value=float(np.median(values)), samples=values)
            points.append(OutcomeRecord(**point, attempt=1, state=PointState.OK, metrics=(metric,)))
        store.apply_many([begin, *points, RunEndRecord(**run, state=RunState.DONE)])
        sides.append(Side(each.name, (run_id,), pooled=True))
    return sides


store_runs: list[str] = []


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commits of the repository, each with its factor."""
    repository = tmp_path / "repository"
    found = []

    def git(*args: str) -> str:
        told = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *told, *args], cwd=repository, check=True, capture_output=True, text=True).stdout

    for package in PACKAGES:
        (repository / package).mkdir(parents=True)
        (repository / package / "factor").write_text("")
    git("init", "-q")
    for number, factor in enumerate(FACTORS):
        (repository / "jobs" / "factor").write_text(str(factor))
        git("add", "-A")
        git("commit", "-q", "-m", f"{number}")
        found.append(git("rev-parse", "HEAD").strip())
    monkeypatch.setattr(interleave, "SOURCES", repository)
    monkeypatch.setattr(Turns, "measure", made_up)
    monkeypatch.setenv("NSA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NSA_DATABASE_URL", raising=False)
    return found


def test_the_commit_of_a_slowdown_is_found_and_those_that_cannot_be_told_are_named(commits: list[str]) -> None:
    store_runs.clear()
    done = nsa("bisect", commits[0], commits[6], "fake.yaml")
    assert (done.code, done.out.splitlines()[-1]) == (1, f"first worse: {commits[3]} or {commits[4]}"), done
    assert len(store_runs) <= 12, "halved, not one after the other"
    done = nsa("bisect", commits[4], commits[6], "fake.yaml", "--threshold", "3")
    assert (done.code, done.out.splitlines()[-1]) == (0, f"first worse: {commits[6]}")
    done = nsa("bisect", commits[0], commits[2], "fake.yaml")
    assert (done.code, done.out.splitlines()[-1][:24]) == (3, "no cell is proven worse ")
    assert nsa("bisect", commits[2], commits[0], "fake.yaml").err.startswith("error: GOOD: ")
    assert nsa("bisect", commits[2], commits[2], "fake.yaml").err.startswith("error: GOOD: ")
    assert nsa("bisect", commits[2], "nonsense", "fake.yaml").err.startswith("error: BAD: 'nonsense': is none of ")
