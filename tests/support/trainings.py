"""Small trainings over bytes: their text, their specification, and a reporter that keeps what it is told."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.schema.point import Launcher, Measurement, Metric, Surroundings


def write_text(folder: Path) -> Path:
    """Forty files of a little language that is easy to learn, in a folder, which is returned."""
    folder.mkdir(exist_ok=True)
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(f"the cat number {i} sat on the mat. " * 30)
    return folder


def small(text: Path, **changes: Any) -> dict[str, Any]:
    """The specification of a training of a few steps over the files in `text`, with `changes`."""
    data: dict[str, Any] = {
        "kind": "train",
        "name": "t",
        "device": "cpu",
        "seq_len": 32,
        "batch": 4,
        "steps": 8,
        "optimizer": {"warmup_steps": 3, "learning_rate": 1e-2},
        "data": {"path": str(text), "heldout": 0.2, "heldout_batches": 2},
    }
    return data | changes


class Keeping:
    """A Reporter that keeps all that it is told: texts by name, series as name -> step -> value, also of each rank."""

    def __init__(self, folder: Path | None = None, key: str = "k", launcher: Launcher | None = None) -> None:
        self.surroundings = Surroundings(f"file://{folder}" if folder else None, key, launcher)
        self.warnings: list[str] = []
        self.series: dict[str, dict[int, float]] = {}
        self.by_rank: dict[tuple[str, int], dict[int, float]] = {}
        self.kept: dict[str, str] = {}
        self.phases: list[str] = []
        self.started: list[list[int]] = []

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.phases.append(phase)

    def sample(self, step: int, values: dict[str, float], rank: int = 0) -> None:
        for name, value in values.items():
            self.series.setdefault(name, {})[step] = value
            self.by_rank.setdefault((name, rank), {})[step] = value

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def keep(self, name: str, text: str) -> None:
        self.kept[name] = text

    def ranks(self, pids: Sequence[int]) -> None:
        self.started.append([*pids])


class Watching(Keeping):
    """A Reporter that keeps what it is told, and acts once when training has got to a step."""

    def __init__(
        self,
        folder: Path | None,
        *,
        key: str = "k",
        launcher: Launcher | None = None,
        at: int = -1,
        act: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(folder, key, launcher)
        self.trained: list[int] = []
        self._at, self._act = at, act

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        if phase != "train":
            return
        self.trained.append(done)
        if 0 <= self._at <= done:
            self._at = -1
            self._act()


def interrupt() -> None:
    """Ask a training in this process to end."""
    os.kill(os.getpid(), signal.SIGTERM)


def by_name(result: Measurement) -> dict[str, Metric]:
    """The metrics of a result by their names."""
    return {metric.name: metric for metric in result.metrics}


def of_the_kill(warnings: Sequence[str]) -> str:
    """The only warning of ranks that start again; a checkpoint that the kill interrupted may be told of, too."""
    (kill,) = [warning for warning in warnings if "; restart " in warning]
    others = [warning for warning in warnings if warning != kill]
    assert all("checkpoint of step " in warning and " was not saved: " in warning for warning in others), others
    return kill


EARLY = 4
"""Steps whose losses are compared tightly; later ones amplify the last bits of a sum, by processor."""


def trains_alike(losses: Sequence[float], expected: Sequence[float], rel: float = 1e-5) -> None:
    """Assert that a training begins as another one does but for the order of sums, is as long, and learns."""
    assert losses[:EARLY] == pytest.approx(expected[:EARLY], rel=rel), "but for the order of sums"
    assert len(losses) == len(expected)
    assert min(losses[EARLY:]) < losses[0]
