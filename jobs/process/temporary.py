"""Folders of temporary files that end with the process that made them.

A process that is killed leaves its folders, which may hold gigabytes of checkpoints. Each folder has a locked file,
which the kernel unlocks when its process ends, however it does; the next folder that is made removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

POINT = "nsa-point-"
RANK = "nsa-rank-"
_LOCK = ".owner"


class Folder:
    """A new folder, readable by its user alone.

    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        new = self.path / f"{_LOCK}.new"  # renamed once it is locked: until then nobody takes the folder for abandoned
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a filesystem without locks: nobody else removes the folder
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all in it, as far as it can be removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose processes have ended."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith((POINT, RANK)) and _abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether a folder is this user's and its lock free; one without a lock is left alone."""
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            return False
        lock = os.open(f"{entry.path}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(lock)
    except OSError:
        return False
    return True
