"""Files that users name: nothing is waited for, and what cannot be read or written is an OSError with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from jobs.specs.load import load_spec
from jobs.specs.spec import SpecError
from jobs.specs.user_files import NotAFileError, open_regular, write_output

pytestmark = pytest.mark.timeout(20)
KINDS = [os.mkfifo, partial(os.symlink, "/dev/zero"), Path.mkdir]


@pytest.mark.parametrize("make", KINDS, ids=["pipe", "device", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotAFileError, match="is not a regular file"):
        open_regular(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("make", KINDS, ids=["pipe", "device", "folder"])
def test_a_spec_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x.yaml")
    with pytest.raises(SpecError, match=r"^spec: '.*x\.yaml' is no file; give the path of a YAML file$"):
        load_spec(tmp_path / "x.yaml")


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(OSError, match="is a pipe that nobody reads"):
        write_output(tmp_path / "x", "text")
