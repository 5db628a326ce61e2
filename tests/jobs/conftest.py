"""Fixtures: the text of small trainings."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainings import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of forty small files."""
    return write_text(tmp_path_factory.mktemp("text"))
