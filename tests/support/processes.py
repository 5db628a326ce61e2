"""Processes of a test, which may end at any moment."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants(process: psutil.Process, title: str) -> list[psutil.Process]:
    """Processes below `process` that have `title` in their command line, the oldest first."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(child.cmdline()):
                found.append((child.create_time(), child.pid, child))
    return [child for *_, child in sorted(found)]


def is_alive(process: psutil.Process | int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
