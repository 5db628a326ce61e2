"""Temporary folders of processes that were killed, and of those that run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from jobs.process import temporary
from jobs.process.child import Child

_OWNER = """
import sys
from jobs.process import temporary
for prefix in (temporary.POINT, temporary.RANK):
    folder = temporary.Folder(prefix)
    (folder.path / "tmp").mkdir()
    (folder.path / "tmp" / "record.json").write_text("{}")
    print(folder.path, flush=True)
    temporary.folders = [*getattr(temporary, "folders", []), folder]
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that has made a folder of each sort in a temporary folder of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", _OWNER]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [Path(process.stdout.readline().strip()).parent for _ in range(2)] == [tmp_path] * 2
        yield process
        process.kill()


def test_folders_of_a_killed_process_are_removed_by_the_next(owner: subprocess.Popen[str], tmp_path: Path) -> None:
    running = set(tmp_path.iterdir())
    child = Child("builtins:print")
    assert {path for path in tmp_path.iterdir() if path != child.temporary.parent} == running  # it still runs
    for path in running:
        os.utime(path, (1, 1))
    owner.kill()
    owner.wait()
    assert set(tmp_path.iterdir()) > running
    with closing(temporary.Folder(temporary.RANK)) as folder:
        assert set(tmp_path.iterdir()) == {folder.path, child.temporary.parent}
    child.discard()
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what has another name, nor a folder whose process has not locked it yet, nor what a link leads to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("other", "nsa-point-1", "nsa-point-2"):
        (tmp_path / name).mkdir()
    for name in ("other", "nsa-point-1"):
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "nsa-rank-2").symlink_to(tmp_path / "other")
    (tmp_path / "nsa-rank-3").touch()
    temporary.remove_abandoned()
    assert {path.name for path in tmp_path.iterdir()} == {"other", "nsa-point-2", "nsa-rank-2", "nsa-rank-3"}
