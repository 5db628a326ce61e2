"""A commit and today's sources measured in turns, in a throwaway repository of these sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import git

from orchestrator.execute.upload import sources
from orchestrator.settings import SOURCES
from orchestrator.store import Store, queries

KIND = """
import sys
from typing import Literal

from jobs.hardware.stats import summarize
from jobs.schema import point
from jobs.schema.axes import Axes
from jobs.schema.point import Machine, Measurement, Point
from jobs.schema.quantities import TIME
from jobs.specs.spec import JobSpec

QUANTITIES = (TIME,)
FACTORS = {factors}
if local := sys.modules.get("orchestrator.execute.local"):  # in the driver: no child that imports torch to look
    local.LocalExecutor.probe = lambda self: {{None: Machine("cpu", "test", 8 << 30, {{"torch": "0"}})}}


class Case(point.Case):
    length: int


class Spec(JobSpec):
    kind: Literal["fake"]

    def points(self, machine):
        return [Point("fake", f"S={{s}}", Case(length=s), Axes(implementation="fake", seq_len=s)) for s in FACTORS]


def measure(case, beat):
    times = tuple(FACTORS[case.length] * case.length * (1 + i % 7 / 2000) for i in range(20))
    return Measurement((summarize(TIME, times, "made up"),))
"""


@pytest.mark.long
def test_a_commit_and_todays_sources_are_measured_in_turns_and_compared(tmp_path: Path) -> None:
    """In a checkout of these sources with a kind whose times are made up."""
    repository, home = tmp_path / "repository", tmp_path / "home"
    home.mkdir()
    (home / "fake.yaml").write_text("kind: fake\nname: fake\ndevice: cpu\nisolation: warm\n")
    for name, path in [*sources(), ("pyproject.toml", SOURCES / "pyproject.toml")]:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes(path.read_bytes())
    (repository / ".gitignore").write_text("__pycache__\n")
    git(repository, "init", "-q")

    def commit(factors: dict[int, float]) -> str:
        (repository / "jobs" / "fake.py").write_text(KIND.format(factors=factors))
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", "change")
        return git(repository, "rev-parse", "HEAD")

    before = commit({512: 1.0, 2048: 1.0})
    commit({512: 1.0, 2048: 1.03})
    command = [sys.executable, "-c", "from orchestrator.cli.commands import main; main()", "compare"]
    command += ["--interleave", "fake.yaml", "--at", before[:9], "--turns", "1", "--local", "--format", "md"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    env |= {"NSA_HOME": str(home / "var"), "PYTHONPATH": str(repository), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True)  # outside, as anyone may
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("turn ")] == [
        *(f"turn 1 of 1: {name}" for name in (before[:7], "today"))
    ]
    assert "2 cells: 1 slower, 1 same; mean ratios: fake 1.015" in done.stdout
    with Store.open(f"sqlite:///{home}/var/nsa.db", readonly=True) as store:
        assert len(queries.runs(store, commit=before[:9])) == 1, "the turns are stored"
