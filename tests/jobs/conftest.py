"""Fixtures: the text of small trainings, ranks that serve several of them, and a folder for temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
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
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files, as a point's process has one: others empty that of the host beside this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
