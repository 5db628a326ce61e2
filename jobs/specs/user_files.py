"""Files that a user names, opened without waiting: a pipe may have nobody at its other end, a device no end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO


class NotAFileError(OSError):
    """There is something else than a regular file: a folder, a pipe, a device."""


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """A regular file, open for reading. Raises OSError; NotAFileError for anything else."""
    try:
        path.stat()
    except ValueError:  # of a NUL
        raise OSError(errno.EINVAL, "is no file's name", str(path)) from None
    if not path.is_file():
        raise NotAFileError(errno.EINVAL, "is not a regular file", str(path))
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
    """Write a file, or to a device or a pipe with a reader; its folder is made. Text is UTF-8, its newlines as given.

    Raises OSError: it cannot be written, or is a pipe that nobody reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except ValueError:  # of a NUL
        raise OSError(errno.EINVAL, "is no file's name", str(path)) from None
    except OSError as err:
        reason = "is a pipe that nobody reads" if err.errno == errno.ENXIO else err.strerror
        raise OSError(err.errno, reason, str(path)) from None
    os.set_blocking(fd, True)
    with os.fdopen(fd, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
