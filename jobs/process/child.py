"""A process that answers commands, from both sides: the parent's handle on it, with deadlines, and its own main.

`python -m jobs.process.child EVENTS_FD MODULE:FUNCTION` reads commands from stdin and writes events to the pipe
EVENTS_FD (jobs.process.messages); FUNCTION is called with each command and the process's Channel, and returns the last
event of its answer. The process ends with its parent.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from jobs.process import compiler_cache, messages, post_mortem, temporary
from jobs.process.post_mortem import describe_exit, oom_kills, tail, waited_s
from jobs.schema.files import File
from jobs.schema.plain_text import shortened
from jobs.schema.point import REPEATED, REPEATING, STARTING, TIMED, TIMING, WAITING, Interrupted
from jobs.schema.states import PointState

SOURCES = Path(__file__).resolve().parents[2]
POLL_S = 0.2
_PACKAGES = ("nsa_core", "jobs", "orchestrator")  # that a process imports
_REAP_S = 30.0
_LOW_MEMORY = 0.02  # share of the host's memory: below it, a SIGKILL not sent by us is one for want of memory
_REASON = 2_000  # characters
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: not enough memory",
    "allocate memory",  # of PyTorch's allocator on a CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
# Most by which the process's clock may differ from the parent's, and lag behind. What calls take in a row, without the
# work between samples that hides their launching, may be several times the samples' time on a GPU.
_APART, _STALL_S = {TIMED: ("timed calls", 1.1), REPEATED: ("the same calls in a row", 3.0)}, 1.0
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


class Child:
    """A process in a session of its own."""

    def __init__(self, answer: str, *, env: Mapping[str, str | None] | None = None, python: str | None = None) -> None:
        """Start the process. Raises OSError: the interpreter cannot be started.

        Args:
            answer: "module:name" of the function that answers its commands.
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
                    [python or sys.executable, "-m", "jobs.process.child", str(writing), answer],
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
        self.inbox = messages.Inbox(reading)  # its events
        self.pid = self._process.pid
        self._seen: dict[int, psutil.Process] = {}

    def send(self, command: messages.Command) -> None:
        """Send a command. Ignored if the process has died; see `alive`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(messages.encode(command))
            self._process.stdin.flush()

    def alive(self) -> bool:
        """False once the process has ended. Does not reap it: its process group's number stays taken."""
        return self._process.returncode is None and post_mortem.child_runs(self.pid)

    def note_descendants(self) -> None:
        """Remember them for `kill`: once the process has died, a daemon with variables of its own is in no tree."""
        pids = [self.pid]
        for pid in pids:  # which grow meanwhile
            with contextlib.suppress(OSError, psutil.Error):  # it has ended
                self._seen[pid] = self._seen.get(pid) or psutil.Process(pid)
                for thread in os.listdir(f"/proc/{pid}/task"):  # Path.glob takes 2.5 times as long
                    pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())

    def tree(self) -> list[psutil.Process]:
        """The process and its descendants, those included whose parents have ended."""
        found = dict(self._seen)
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            found |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return [process for process in found.values() if process.is_running()]

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
            tree = [*self.tree(), *filter(self._started, psutil.process_iter(["environ"]))]
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

    def _started(self, process: psutil.Process) -> bool:
        """Whether a process, as a daemon in no tree, has this one's temporary files, or prints to its output."""
        if (process.info["environ"] or {}).get("TMPDIR") == str(self.temporary):
            return True
        ours = {os.path.realpath(self.folder / name) for name in self._offsets}
        for number in (1, 2):
            with contextlib.suppress(OSError):  # closed, or the process has ended or is another user's
                if os.readlink(f"/proc/{process.pid}/fd/{number}") in ours:
                    return True
        return False

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


@dataclass(frozen=True)
class Ended:
    """End of a command. After a HANG or TIMEOUT, or with a wrong clock, the process still runs, to be killed."""

    state: PointState
    reason: str | None = None  # why it is not ok, in one line
    result: messages.Measured | messages.ProbedMachine | None = None  # None unless it is ok
    files: tuple[File, ...] = ()  # of the result, or of what explains a failure


@dataclass
class DeadlineWatch:
    """Follows a command from when it is sent."""

    child: Child
    startup_s: float = math.inf  # until the first sign of progress
    heartbeat_s: float = math.inf  # between two signs
    whole_s: float = math.inf  # for the whole command
    phase: str = ""  # of the last progress
    _start: float = field(default_factory=time.monotonic)
    _last_beat: float | None = None
    _read: float = field(default_factory=time.monotonic)  # when events were read last
    _timing: tuple[float, float] | None = None  # earliest and latest begin of phase `time` or `repeat`
    _waited: float = 0.0  # of the process, for processors, at that begin
    _kills: int = field(default_factory=lambda: oom_kills())
    _low_memory: bool = False

    def step(self) -> tuple[list[messages.Message], Ended | None]:
        """New events, and the end once there is one; waits POLL_S at most."""
        alive = self.child.alive()  # asked before reading: events of a process that dies now are still read
        before = self._read  # what is read now came later, however long it has lain in the pipe
        events = self.child.inbox.receive(POLL_S if alive else 0)
        self._read = time.monotonic()
        for number, event in enumerate(events):
            match event:
                case messages.Beat(phase, done):
                    now = self._read
                    if phase in (TIMING, REPEATING) and self.phase != phase:
                        self._timing, self._waited = (before, now), waited_s(self.child.pid)
                    elif phase in _APART and self._timing is not None:
                        what, apart = _APART[phase]
                        low, high, took = before - self._timing[1], now - self._timing[0], done / 1000
                        if phase == REPEATED:  # a short sample seldom waits
                            low -= max(0, waited_s(self.child.pid) - self._waited)
                        if not (low - _STALL_S) / apart <= took <= high * apart + _STALL_S:
                            both = f"{took:.3g} s by the process's clock, {max(0, low):.3g} to {high:.3g} s by its"
                            fix = "measure on an idle machine, without what replaces the clock"
                            reason = f"WrongResult: {what} took {both} parent's; {fix}"
                            return events[:number], Ended(PointState.ERROR, reason)
                    if self._last_beat is not None and phase == self.phase and phase.startswith(WAITING):
                        self._start += now - self._last_beat  # the point's deadline does not run
                    self._last_beat, self.phase = now, phase
                case messages.Measured(files=files):
                    return events[:number], Ended(PointState.OK, None, event, files)
                case messages.ProbedMachine():
                    return events[:number], Ended(PointState.OK, None, event)
                case messages.Failure(state, reason, files):
                    return events[:number], Ended(state, reason, None, files)
        if alive:
            self.child.note_descendants()
            memory = psutil.virtual_memory()
            self._low_memory = memory.available < _LOW_MEMORY * memory.total
            return events, self._overdue()
        if events:  # there may be more
            return events, None
        code = self.child.kill()
        if code == -signal.SIGKILL and (self._low_memory or oom_kills() > self._kills):  # not sent by us
            return [], Ended(PointState.OOM, f"{describe_exit(code)} by the kernel, which was out of memory")
        return [], Ended(PointState.CRASH, describe_exit(code))

    def _overdue(self) -> Ended | None:
        now = time.monotonic()
        silent = now - (self._start if self._last_beat is None else self._last_beat)
        starts = self._last_beat is None or self.phase == STARTING or self.phase.startswith(WAITING)
        last = "before its first progress" if self._last_beat is None else f"(last in phase {self.phase!r})"
        if starts and silent > self.startup_s:
            return Ended(PointState.HANG, f"no progress within the {self.startup_s:g} s for start-up")
        if not starts and silent > self.heartbeat_s:
            return Ended(PointState.HANG, f"no progress for {self.heartbeat_s:g} s {last}")
        if now - self._start > self.whole_s:
            return Ended(PointState.TIMEOUT, f"not done after {self.whole_s:g} s {last}")
        return None


class Channel(messages.Outbox):
    """The pipe to the parent."""

    # Files that explain the running work, text by name; called by the thread that reads commands.
    explain: Callable[[], Mapping[str, str]] = dict


def main(argv: list[str]) -> None:
    channel = Channel(int(argv[1]))
    os.set_inheritable(channel.fd, False)
    end_with_parent()
    _end_group_with_this()
    post_mortem.offer_stacks()  # for where py-spy may not attach
    commands: queue.SimpleQueue[messages.Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, channel), name="commands", daemon=True).start()
    module, _, name = argv[2].partition(":")
    answer: Callable[[messages.Command, Channel], messages.Event] = getattr(importlib.import_module(module), name)
    while True:
        command = commands.get()
        try:
            event = answer(command, channel)
        except Exception as err:
            event = failure(err)
        channel.send(event)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():  # release memory before a warm process's next point
            with contextlib.suppress(Exception):  # a failed kernel broke the context; the parent discards this process
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, also if this one is stuck or stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _end_group_with_this() -> None:
    """Have the process group killed when this process ends, however it does, and adopt orphans of its descendants.

    A shell whose stdin ends with this process does it: what a point starts itself would live on.
    """
    if os.getpgrp() != os.getpid():  # started by hand: never kill a terminal's group
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    command = ["/bin/sh", "-c", "read _; kill -9 0"]
    subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reading)
    os.register_at_fork(after_in_child=lambda: os.close(writing))


def _read(commands: queue.SimpleQueue[messages.Command], channel: Channel) -> None:
    """Queue the parent's commands, from a descriptor that subprocesses do not inherit; end at their end."""
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for line in source:
        command = messages.decode(line)
        if not isinstance(command, messages.Explain):
            commands.put(command)  # pyright: ignore[reportArgumentType] - a parent sends nothing else
            continue
        try:
            files = channel.explain()
        except Exception as err:
            files = {"stacks-of-ranks.txt": f"not found: {type(err).__name__}: {err}"}
        channel.send(messages.Explanation(write_files(files)))
    os._exit(1)


def failure(err: Exception) -> messages.Failure:
    """An exception as a Failure: its traceback and CUDA's memory are files."""
    state = PointState.OOM if ran_out_of_memory(err) else PointState.ERROR
    state = PointState.CANCELLED if isinstance(err, Interrupted) else state
    text = str(err).strip().split("\n")[0]  # its file has the whole text
    if fix := compiler_cache.lost_file(err):
        state, text = PointState.LOST, fix  # handed out again
    reason = f"{type(err).__name__}: {shortened(text, _REASON)}" if text else type(err).__name__
    reason = reason.encode(errors="backslashreplace").decode()  # a journal takes no lone surrogates
    files = {"traceback.txt": "".join(traceback.format_exception(err))}
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # must not replace the failure that it explains
        if torch is not None and torch.cuda.is_initialized():
            files["memory_summary.txt"] = torch.cuda.memory_summary()
            files["memory_stats.json"] = json.dumps(torch.cuda.memory_stats(), indent=1)
    return messages.Failure(state, reason, write_files(files))


def ran_out_of_memory(err: BaseException) -> bool:
    """Whether an exception, or one in its chain of causes, means that memory ran out."""
    if isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError":  # PyTorch's on a GPU
        return True
    if isinstance(err, RuntimeError) and any(text in str(err) for text in _OUT_OF_MEMORY):
        return True
    return err.__cause__ is not None and ran_out_of_memory(err.__cause__)


def write_files(files: Mapping[str, str | os.PathLike[str]]) -> tuple[File, ...]:
    """Files for the parent to keep; texts are written to temporary ones, under names made here."""
    written: list[File] = []
    for name, content in files.items():
        if isinstance(content, os.PathLike):
            written.append(File(name, os.path.abspath(os.fsdecode(content))))
            continue
        try:
            handle, path = tempfile.mkstemp(prefix="file-")
            with open(handle, "w", encoding="utf-8", errors="replace", newline="") as out:
                out.write(content)
            written.append(File(name, path))
        except OSError as err:
            written.append(File(name, "", f"its text could not be written: {err}"))
    return tuple(written)


if __name__ == "__main__":
    main(sys.argv)
