"""Folders of temporary files that end with the process that made them.

A process that is killed leaves its folders, which may hold gigabytes of checkpoints. Each folder is locked by its
process, and unlocked by the kernel when that ends, however it does; the next folder that is made removes them.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

POINT = "nsa-point-"
RANK = "nsa-rank-"
_YOUNG_S = 2.0  # such a folder may be about to be locked


class Folder:
    """A new folder, readable by its user alone; `contextlib.closing` removes it at the end of a block."""

    def __init__(self, prefix: str) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks: nobody else removes the folder
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder with all in it, as far as it can be removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned() -> None:
    """Remove this user's folders whose processes have ended: those that are not locked."""
    for prefix in (POINT, RANK):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_S:
                    continue
                lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.close(lock)
                shutil.rmtree(path, ignore_errors=True)
