"""Processes of a test, which may end at any moment, and their ports."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def wait_for(
    condition: Callable[[], bool], seconds: float = 20, log: Callable[[], str] = str, *, pause: float = 0.05
) -> None:
    """Wait until a condition holds, asking every `pause` seconds; fail with the log's text after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(pause)


def free_ports(count: int) -> list[int]:
    """Different free ports on loopback; another process may take one before it is used."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def descendants(process: psutil.Process, title: str) -> list[psutil.Process]:
    """Processes below `process` that have `title` in their command line, the oldest first."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
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


def git(folder: Path, *command: str) -> str:
    """Output of git in a folder, run as a user made up for the tests."""
    person = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    return subprocess.check_output(["git", "-C", folder, *person, *command], text=True).strip()
