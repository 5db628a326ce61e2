"""A job kind of another distribution, with an axis and quantities of its own, through every part of the project."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import streamlit as st
from dashboard_pages import show, text

from jobs.schema.states import Result
from orchestrator.judge import analysis
from orchestrator.judge.rules import load_gates
from orchestrator.judge.verdicts import evaluate
from orchestrator.report.template import report
from orchestrator.store import Store, exporter, importer, queries

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = Path(__file__).with_name("outside")
SPEC = """
kind: copying
name: copies
device: cpu
isolation: warm
lengths: [256, 512, 1024]
chunks: [1, 4]
"""
RULES = """
targets:
  - name: copies
    title: copies in four chunks are no crawl
    rules:
      - rule: bandwidth
        title: a gibibyte in 1,000 seconds at least
        kind: metric
        metric: bandwidth
        unit: GiB/s
        where: {job: copying, axes: {chunks: {at_least: 2}}}
        at_least: 0.001
        min_points: 3
        every: true
        measure: run the copies
      - rule: chunk-size
        title: a quarter of the tensor, so linear in S
        kind: exponent
        metric: chunk_size
        where: {job: copying, axes: {chunks: 4}}
        at_most: 1.01
        measure: run the copies
"""


def python(home: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(OUTSIDE)]), "NSA_HOME": str(home)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of one run, and what the run printed."""
    home = tmp_path_factory.mktemp("outside")
    (home / "spec.yaml").write_text(SPEC)
    (home / "printed.txt").write_text(python(home, "-m", "jobs", str(home / "spec.yaml"), "--local"))
    return home


@pytest.fixture
def store(home: Path):
    with Store.open(f"sqlite:///{home / 'nsa.db'}", create=False, readonly=True) as store:
        yield store


def run_of(store: Store) -> str:
    return str(queries.runs(store).iloc[0]["run_id"])


def test_it_runs_and_its_summary_shows_the_headline(home: Path):
    printed = (home / "printed.txt").read_text()
    assert "6/6" in printed
    assert "bandwidth" in printed


def test_its_axis_and_quantities_are_stored(store: Store):
    points = queries.points(store, run_of(store))
    assert sorted(points["axis_chunks"]) == [1, 1, 1, 4, 4, 4]
    declared = queries.quantities(store, [run_of(store)])
    assert [(q.name, q.unit, q.title) for q in declared][1:] == [
        ("bandwidth", "GiB/s", "Copy bandwidth"),
        ("chunk_size", "MiB", "Size of a chunk"),
    ]


def test_its_axis_keeps_curves_apart(store: Store):
    fits = analysis.scaling_fits(queries.scaling(store))
    series = {(fit.metric, fit.series["axis_chunks"]) for fit in fits}
    assert series == {("time", 1), ("time", 4), ("chunk_size", 1), ("chunk_size", 4)}


def test_a_rule_judges_it_by_its_own_axis(store: Store, home: Path):
    (home / "gates.yaml").write_text(RULES)
    (verdict,) = evaluate(store, load_gates(home / "gates.yaml"))
    assert verdict.result is Result.GO, [rule.reason for rule in verdict.rules]
    bandwidth, chunk_size = verdict.rules
    assert " in 4" in bandwidth.reason
    assert "the worst of 3 points" in bandwidth.reason
    assert chunk_size.value == pytest.approx(1.0)


def test_an_export_carries_it_into_another_database(store: Store, tmp_path: Path):
    exporter.export(store, tmp_path / "out.csv", [run_of(store)])
    assert set(pd.read_csv(tmp_path / "out.csv")["axis_chunks"]) == {1, 4}
    with Store.open(f"sqlite:///{tmp_path / 'other.db'}") as other:
        importer.import_file(other, tmp_path / "out.csv")
        numbers = queries.measurements(other)
        assert sorted(numbers.loc[numbers["metric"] == "bandwidth", "axis_chunks"]) == [1, 1, 1, 4, 4, 4]


def test_a_report_shows_it(store: Store):
    written = report(store, [run_of(store)])
    assert "| bandwidth | Copy bandwidth | GiB/s | bytes of the tensor" in written
    assert "chunks 4" in written
    assert "chunk_size [MiB]" in written


def test_the_dashboard_shows_it(home: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSA_HOME", str(home))
    st.cache_data.clear()
    st.cache_resource.clear()
    run_id = run_of(store)
    run = show("runs", run=run_id)
    assert any({"Point", "Chunks", "Bandwidth"} <= set(frame.value.columns) for frame in run.dataframe)
    assert "Copy bandwidth" in text(show("runs", run=run_id, point=f"{run_id}/0"))
    scaling = show("scaling", run=run_id)
    assert "Copy bandwidth" in text(scaling)
    assert "chunks" in [group.label for group in scaling.get("button_group")]
    st.cache_resource.clear()


def test_doctor_lists_it(home: Path):
    printed = python(home, "-c", "from orchestrator.cli.commands import main; main()", "doctor")
    assert "outside-bench 0.1" in " ".join(printed.split())
