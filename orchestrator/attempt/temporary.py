"""Folders of temporary files that end with the process that made them.

A process that is killed leaves its folders, and what should remove them may be killed with it. So each holds a locked
file, which the kernel unlocks when its process ends, however it does; the next folder that is made removes them.
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
_PREFIXES = (POINT, RANK)
_LOCK = ".owner"


class Folder:
    """A new folder, readable by its user alone.

    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock: int | None = None
        with contextlib.suppress(OSError):  # a filesystem without locks: nobody else removes the folder
            self._lock = _locked(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all in it, as far as it can be removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose processes have ended."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIXES) and _abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _locked(folder: Path) -> int:
    """A locked file of the folder. It gets its name once it is locked, so that nobody takes it for abandoned before."""
    lock = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{_LOCK}.new", folder / _LOCK)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _abandoned(entry: os.DirEntry[str]) -> bool:
    """Whether a folder is this user's and its lock free; one without a lock is left alone."""
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            return False
        lock = os.open(f"{entry.path}/{_LOCK}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
