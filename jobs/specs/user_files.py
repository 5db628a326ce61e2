"""Files that a user names: what is read is a regular file, so that no pipe without a writer is waited for."""

import errno
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """A regular file, open for reading. Raises OSError, also for a folder, a pipe or a device."""
    path.stat()
    if not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path.open("rb", buffering=buffering)


def is_missing(path: Path) -> bool:
    """Whether nothing is at a path; False where that may not be looked at, as below another user's folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file; its folder is made. Text is UTF-8, its newlines as given. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
