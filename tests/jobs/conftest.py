"""Fixtures: the text of small trainings, ranks that serve several of them or one, and a folder for temporary files."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import descendants
from trainings import write_text
from warm_ranks import WarmRanks


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of forty small files."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def two_warm_ranks() -> Iterator[WarmRanks]:
    """A launcher of two ranks, whose processes are the same in all tests."""
    launcher = WarmRanks(2)
    yield launcher
    launcher.close()


@pytest.fixture
def started_ranks() -> Callable[[], list[psutil.Process]]:
    """Looks up the processes of the ranks that the test has started, the oldest first: warm ones were there before."""
    before = descendants(psutil.Process(), "spawn_main")
    return lambda: [process for process in descendants(psutil.Process(), "spawn_main") if process not in before]


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files, as a point's process has one: others empty that of the host beside this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
