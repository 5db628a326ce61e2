"""The parent's handle on one worker process (orchestrator.attempt.worker): start, send, receive, kill its tree."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from jobs.hardware.process_usage import descent
from jobs.process.interpreter import variables_for_another
from orchestrator.attempt import protocol, temporary
from orchestrator.execute.artifacts import Source
from orchestrator.settings import PACKAGES, SOURCES, Installation, installation

_EXIT_GRACE_S = 10.0
_REAP_S = 30.0
_LAST_WORDS = 1 << 16  # bytes
_READ, _READS = 1 << 16, 32  # bytes, and how often at once: more than a pipe holds
_LONGEST = 64 << 20  # bytes of an event
_GUARD = """exec 3<&0
{
  read -r _ <&3 || {
    kill -9 "-$0"
    for one in /proc/[0-9]*; do
      grep -qsF "TMPDIR=$1/tmp" "$one/environ" && kill -9 "${one#/proc/}"
    done
    sleep 1
    rm -rf -- "$1"
  }
} &"""


@dataclass(frozen=True)
class Violation:
    """The worker broke the protocol, or speaks another version of it; it must be given up. `reason` is one line."""

    reason: str


class Child:
    """A worker process in its own session."""

    def __init__(
        self,
        *,
        threads: int,
        gpus: str | None = None,
        env: Mapping[str, str | None] | None = None,
        python: str | None = None,
    ) -> None:
        """Start the worker.

        Args:
            threads: CPU threads of its numerical libraries.
            gpus: its CUDA_VISIBLE_DEVICES; None keeps this process's (Ray sets it for a task).
            env: environment variables to set; a value of None unsets one.
            python: path of its interpreter, which has packages of its own; None: this process's.

        Raises:
            OSError: the interpreter, or what watches over it, cannot be started.
        """
        self._python = python or sys.executable
        self._files = temporary.Folder(temporary.POINT)
        self._folder = self._files.path
        self.temporary = self._folder / "tmp"
        self.temporary.mkdir()
        self._buffer = b""
        self._ready = False
        self._offsets = {"stdout": 0, "stderr": 0}
        self._events, events = os.pipe()
        os.set_blocking(self._events, False)
        variables = _environment(threads, gpus) | _temporary(self.temporary)
        if python is not None:
            ours = [SOURCES / package for package in PACKAGES]
            variables = variables_for_another(variables, ours, self._folder / "sources")
        variables |= {name: value for name, value in (env or {}).items() if value is not None}
        for name in [name for name, value in (env or {}).items() if value is None]:
            variables.pop(name, None)
        try:
            with open(self._folder / "stdout", "wb") as out, open(self._folder / "stderr", "wb") as err:
                self._process = subprocess.Popen(
                    [self._python, "-m", "orchestrator.attempt.worker", str(events)],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=err,
                    env=variables,
                    pass_fds=(events,),
                    start_new_session=True,
                )
        except OSError:
            os.close(self._events)
            self._files.remove()
            raise
        finally:
            os.close(events)
        try:
            self._guard = _guard(self.pid, self._folder)
        except OSError:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._events)
            self._files.remove()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: protocol.Command) -> None:
        """Send a command. Ignored if the worker has died; `alive` tells."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(protocol.encode(command))
            self._process.stdin.flush()

    def events(self, timeout: float) -> list[protocol.Event | Violation]:
        """The events that arrived; waits up to `timeout` seconds for the first.

        A line that is not an event, or a worker of another version, gives a `Violation` in its place.
        """
        if not select.select([self._events], [], [], timeout)[0]:
            return []
        pieces = [self._buffer]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS):  # a worker that writes without end holds up no deadline
                if not (chunk := os.read(self._events, _READ)):
                    time.sleep(min(timeout, 0.05))  # end of file stays readable: do not spin until the process is gone
                    break
                pieces.append(chunk)
        *lines, self._buffer = b"".join(pieces).split(b"\n")
        found = [self._event(line) for line in lines]
        if len(self._buffer) > _LONGEST:
            self._buffer = b""
            found.append(Violation(f"the worker sent more than {_LONGEST:,} bytes that are no event"))
        return found

    def alive(self) -> bool:
        """False once the worker has ended. Does not reap it: its process group's number stays taken."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def tree(self) -> list[psutil.Process]:
        """The worker and its descendants; empty once it is gone."""
        return descent(self.pid)()

    def _escaped(self) -> list[psutil.Process]:
        """Processes that the worker's have left behind in sessions of their own: they have its TMPDIR."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != self.pid and process.environ().get("TMPDIR") == str(self.temporary):
                    found.append(process)
        return found

    def new_output(self) -> list[Source]:
        """Output printed since the last call, as artifacts stdout.txt and stderr.txt; empty ones are left out."""
        found = []
        for name, offset in self._offsets.items():
            path = self._folder / name
            try:
                size = path.stat().st_size
            except OSError:  # the measurement removed the folder
                found.append(Source(f"{name}.txt", problem="its file was removed while the point ran"))
                continue
            self._offsets[name] = size
            if size > offset:
                found.append(Source(f"{name}.txt", path, offset, size))
        return found

    def last_words(self) -> str:
        """The end of the text that it printed to stderr."""
        with contextlib.suppress(OSError), (self._folder / "stderr").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_WORDS))
            return file.read().decode(errors="replace")
        return ""

    def close(self) -> int | None:
        """Ask the worker to exit, then kill the rest of its tree. Returns its exit code (minus the signal's number)."""
        self.send(protocol.Exit())
        deadline = time.monotonic() + _EXIT_GRACE_S
        while self.alive() and time.monotonic() < deadline:
            self.events(0.1)
        return self.kill()

    def kill(self) -> int | None:
        """Kill the worker's group, and descendants that left the group, and wait until they are gone.

        Returns:
            Its exit code; None if it survived SIGKILL.
        """
        if self._process.returncode is None:
            strays = {*self.tree(), *self._escaped()}
            self._dismiss_guard()  # before the worker is reaped and its group's number can be reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            strays.update(self._escaped())  # also of a process that forked meanwhile
            for process in strays:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            deadline = time.monotonic() + _REAP_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
            while any(_runs(process) for process in strays) and time.monotonic() < deadline:
                time.sleep(0.01)  # a signal takes effect when its process is next scheduled
        return self._process.returncode

    def _dismiss_guard(self) -> None:
        """Have the guard end without doing anything."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._guard, b"\n")

    def _event(self, line: bytes) -> protocol.Event | Violation:
        try:
            event = protocol.decode_event(line)
        except protocol.ProtocolError as err:
            return Violation(f"the worker sent an unreadable event: {err}")
        match event:
            case protocol.Ready(version=version) if version != protocol.VERSION:
                return Violation(
                    f"the worker ({self._python}) speaks version {version} of the protocol, its supervisor version "
                    f"{protocol.VERSION}; both must run the same sources"
                )
            case protocol.Ready():
                self._ready = True
            case _ if not self._ready:
                return Violation(f"the worker sent {type(event).__name__} before Ready; its version is unknown")
        return event

    def discard(self) -> None:
        """Kill the worker, close its pipes and remove its files. The handle cannot be used afterwards."""
        self.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        for pipe in (self._events, self._guard):
            with contextlib.suppress(OSError):
                os.close(pipe)
        self._files.remove()


def _guard(worker: int, folder: Path) -> int:
    """Start the worker's guard; return the pipe that it reads.

    If this process dies, the guard reads end of file, kills the worker's group, even a stopped one, and removes its
    files, which may be large. The pause: killed processes may still be writing. It is no child of this process: where
    this is a worker of Ray that loses its node, Ray kills its children, and what they have started would live on.
    """
    pipe, sink = os.pipe()
    try:
        subprocess.run(
            ["/bin/sh", "-c", _GUARD, str(worker), str(folder)],
            stdin=pipe,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as err:
        os.close(sink)
        raise OSError(f"its guard cannot be started: {err}") from None
    finally:
        os.close(pipe)
    return sink


def _runs(process: psutil.Process) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _temporary(folder: Path) -> dict[str, str]:
    """Variables for temporary files that end with the child. PyTorch's compiler keeps its cache beyond it."""
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _cache(folder),
    }


def _cache(folder: Path) -> str:
    """The compiler's cache: in the user's home, and in the child's folder where there is none to write to.

    PyTorch's own place has a name that anyone can guess, in a folder where all users may write: who makes it first
    chooses the code that others run.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsa-bench" / "torchinductor"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # of a container's user without a home
        return str(folder / "torchinductor")
    return str(cache if os.access(cache, os.W_OK) else folder / "torchinductor")


def _environment(threads: int, gpus: str | None) -> dict[str, str]:
    env = dict(os.environ)
    if installation() is not Installation.INSTALLED:  # an environment's own packages must not precede its library
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order, so that telemetry samples the child's GPU
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return env
