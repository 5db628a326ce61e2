"""The parent's handle on a process (jobs.process.worker): start, send, receive, kill its tree."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from jobs.process import compiler_cache, temporary
from jobs.process.messages import Command, File, Inbox, encode
from jobs.process.post_mortem import tail

SOURCES = Path(__file__).resolve().parents[2]
_PACKAGES = ("nsa_core", "jobs", "orchestrator")  # that a process imports
_REAP_S = 30.0


class Child:
    """A process in a session of its own."""

    def __init__(self, answer: str, *, env: Mapping[str, str | None] | None = None, python: str | None = None) -> None:
        """Start the process. Raises OSError: the interpreter cannot be started.

        Args:
            answer: "module:name" of the function that answers its commands (jobs.process.worker).
            env: environment variables to set, after those of this process; a value of None unsets one.
            python: path of its interpreter, which has packages of its own; None: this process's.
        """
        self._files = temporary.Folder(temporary.POINT)
        self.folder = self._files.path  # with its output, removed by `discard`
        self.temporary = self.folder / "tmp"  # its temporary files
        self.temporary.mkdir()
        self._offsets = {"stdout": 0, "stderr": 0}
        variables = _search_path(self.folder, another=python is not None) | compiler_cache.folders(self.folder)
        variables |= {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.temporary), **(env or {})}
        variables = {name: value for name, value in variables.items() if value is not None}
        reading, writing = os.pipe()
        try:
            with open(self.folder / "stdout", "wb") as out, open(self.folder / "stderr", "wb") as err:
                self._process = subprocess.Popen(
                    [python or sys.executable, "-m", "jobs.process.worker", str(writing), answer],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    env=variables,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
        except OSError:
            os.close(reading)
            self._files.close()
            raise
        finally:
            os.close(writing)
        self.inbox = Inbox(reading)  # its events
        self.pid = self._process.pid

    def send(self, command: Command) -> None:
        """Send a command. Ignored if the process has died; see `alive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode(command))
            self._process.stdin.flush()

    def alive(self) -> bool:
        """False once the process has ended. Does not reap it: its process group's number stays taken."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def tree(self) -> list[psutil.Process]:
        """The process and its descendants, those included whose parents have ended; empty once it is gone."""
        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def new_output(self) -> list[File]:
        """Output since the last call, as stdout.txt and stderr.txt; empty ones are left out."""
        files = []
        for name, offset in self._offsets.items():
            path = self.folder / name
            self._offsets[name] = size = path.stat().st_size
            if size > offset:
                files.append(File(f"{name}.txt", str(path), start=offset, stop=size))
        return files

    def tail(self, lines: int = 200) -> str:
        """The last lines that it printed to stdout, then to stderr."""
        return "\n".join(filter(None, (tail(self.folder / name, lines) for name in self._offsets)))

    def kill(self) -> int | None:
        """Kill the process's group, and descendants that left the group, and wait until they are gone.

        Returns its exit code; None if it survived SIGKILL.
        """
        if self._process.returncode is None:
            # Daemons of a process that has died are in no tree, but have its folder of temporary files.
            own = {"TMPDIR": str(self.temporary)}.items()
            daemons = [p for p in psutil.process_iter(["environ"]) if own <= (p.info["environ"] or {}).items()]
            tree = [*self.tree(), *daemons]
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            for process in tree:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            deadline = time.monotonic() + _REAP_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
            while any(map(_runs, tree)) and time.monotonic() < deadline:
                time.sleep(0.01)  # a signal takes effect when its process is next scheduled
        return self._process.returncode

    def discard(self) -> None:
        """Kill the process, close its pipes and remove its files. The handle cannot be used afterwards."""
        self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self.inbox.fd)
        self._files.close()


def _runs(process: psutil.Process) -> bool:
    """Whether the process exists and is not a zombie, which a container's first process may never reap."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _search_path(folder: Path, *, another: bool) -> dict[str, str | None]:
    """This process's environment, in which a child imports these sources."""
    variables: dict[str, str | None] = dict(os.environ)
    if another:
        # Another interpreter must find none of this one's packages. These sources may lie among them, so its search
        # path is a folder of links to them alone, without the working directory.
        links = folder / "sources"
        links.mkdir()
        for package in _PACKAGES:
            (links / package).symlink_to(SOURCES / package)
        return variables | {"PYTHONHOME": None, "PYTHONPATH": str(links), "PYTHONSAFEPATH": "1"}
    if SOURCES.name not in ("site-packages", "dist-packages"):  # which must not precede the standard library
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    return variables
