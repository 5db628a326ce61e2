"""A process that answers commands: `python -m jobs.process.worker EVENTS_FD MODULE:FUNCTION`.

It reads commands from stdin and writes events to the pipe EVENTS_FD (jobs.process.messages); FUNCTION is called with
each command and this process's Channel, and returns the last event of its answer. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping

from jobs.process import stacks
from jobs.process.compiler_cache import lost_file
from jobs.process.messages import Command, Event, Explain, Explanation, Failure, File, Outbox, decode
from jobs.schema.plain_text import shortened
from jobs.schema.point import Interrupted
from jobs.schema.states import PointState

_REASON = 2_000  # characters
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: not enough memory",
    "allocate memory",  # of PyTorch's allocator on a CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


class Channel(Outbox):
    """The pipe to the parent."""

    # Files that explain the running work, text by name; called by the thread that reads commands.
    explain: Callable[[], Mapping[str, str]] = dict


def main(argv: list[str]) -> None:
    channel = Channel(int(argv[1]))
    os.set_inheritable(channel.fd, False)
    end_with_parent()
    _end_group_with_this()
    stacks.offer()  # for where py-spy may not attach
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, channel), name="commands", daemon=True).start()
    module, _, name = argv[2].partition(":")
    answer: Callable[[Command, Channel], Event] = getattr(importlib.import_module(module), name)
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


def _read(commands: queue.SimpleQueue[Command], channel: Channel) -> None:
    """Queue the parent's commands, from a descriptor that subprocesses do not inherit; end at their end."""
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for line in source:
        command = decode(line)
        if not isinstance(command, Explain):
            commands.put(command)  # pyright: ignore[reportArgumentType] - a parent sends nothing else
            continue
        try:
            files = channel.explain()
        except Exception as err:
            files = {"stacks-of-ranks.txt": f"not found: {type(err).__name__}: {err}"}
        channel.send(Explanation(write_files(files)))
    os._exit(1)


def failure(err: Exception) -> Failure:
    """An exception as a Failure: its traceback and CUDA's memory are files."""
    state = PointState.OOM if ran_out_of_memory(err) else PointState.ERROR
    state = PointState.CANCELLED if isinstance(err, Interrupted) else state
    text = str(err).strip().split("\n")[0]  # its file has the whole text
    if fix := lost_file(err):
        state, text = PointState.LOST, fix  # handed out again
    reason = f"{type(err).__name__}: {shortened(text, _REASON)}" if text else type(err).__name__
    reason = reason.encode(errors="backslashreplace").decode()  # a journal takes no lone surrogates
    files = {"traceback.txt": "".join(traceback.format_exception(err))}
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # must not replace the failure that it explains
        if torch is not None and torch.cuda.is_initialized():
            files["memory_summary.txt"] = torch.cuda.memory_summary()
            files["memory_stats.json"] = json.dumps(torch.cuda.memory_stats(), indent=1)
    return Failure(state, reason, write_files(files))


def ran_out_of_memory(err: BaseException) -> bool:
    """Whether an exception, or one in its chain of causes, means that memory ran out."""
    cause: BaseException | None = err
    while cause is not None:
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":  # PyTorch's on a GPU
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _OUT_OF_MEMORY):
            return True
        cause = cause.__cause__
    return False


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
