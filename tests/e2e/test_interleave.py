"""A commit and today's sources measured in turns, in a throwaway repository of these sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


class Repository:
    """A checkout of these sources with a kind whose times are made up, and `nsa` as it runs there."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        for name, path in [*sources(), ("pyproject.toml", SOURCES / "pyproject.toml")]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())
        (folder / ".gitignore").write_text("__pycache__\n")
        (home / "fake.yaml").write_text("kind: fake\nname: fake\ndevice: cpu\nisolation: warm\n")
        self.git("init", "-q")

    def git(self, *args: str) -> str:
        told = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *told, *args], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, **factors: float) -> str:
        made = {int(name[1:]): factor for name, factor in factors.items()}
        (self.folder / "jobs" / "fake.py").write_text(KIND.format(factors=made))
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "change")
        return self.git("rev-parse", "HEAD")

    def nsa(self, *args: str) -> subprocess.CompletedProcess[str]:
        """`nsa`, run outside of the repository, as anyone may."""
        told = {"NSA_HOME": str(self.home / "var"), "PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", "from orchestrator.cli.commands import main; main()", *args]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
        return subprocess.run(command, cwd=self.home, env=environment | told, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    for name in ("repository", "home"):
        (tmp_path / name).mkdir()
    return Repository(tmp_path / "repository", tmp_path / "home")


@pytest.mark.long
def test_a_commit_and_todays_sources_are_measured_in_turns_and_compared(repository: Repository) -> None:
    before = repository.commit(S512=1.0, S2048=1.0)
    repository.commit(S512=1.0, S2048=1.03)
    order = ("compare", "--interleave", "fake.yaml", "--at", before[:9], "--turns", "1", "--local", "--format", "md")
    done = repository.nsa(*order)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("turn ")] == [
        *(f"turn 1 of 1: {name}" for name in (before[:7], "today")),
    ]
    assert "2 cells: 1 slower, 1 same; mean ratios: fake 1.015" in done.stdout
    with Store.open(f"sqlite:///{repository.home}/var/nsa.db", readonly=True) as store:
        assert len(queries.runs(store, commit=before[:9])) == 1, "the turns are stored"
