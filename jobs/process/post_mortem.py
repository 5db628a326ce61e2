"""What a process does before it is killed, and what it died of."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from jobs.process import stacks

TOOL_S = 20.0
"""Seconds that py-spy and nvidia-smi have."""

DUMPS_S = TOOL_S + 5.0
"""Seconds that py-spy has for all processes: more than for the first few, which may all be stuck."""

_DEATH_S = 1.0
_WRITING_S = 0.5  # until stacks are written, and those of ranks have reached the point's stderr

STACKS_S = _WRITING_S + DUMPS_S + _DEATH_S
"""Seconds after which `request_stacks` and `dumps` have ended."""

NO_PY_SPY = "py-spy is not installed on this host: pip install py-spy"

_CGROUPS = Path("/sys/fs/cgroup")
_AT_A_TIME = 8
_READS = 4  # of a stack that changes while it is read: seen to fail once in two
_LOW_MEMORY = 0.02  # share of the host's memory: below it, a SIGKILL not sent by us is attributed to the kernel
_TAIL_BYTES = 1 << 16


def describe_exit(code: int | None) -> str:
    """An exit code in words: "killed by SIGSEGV", "exited with code 3 and no result"; None: SIGKILL had no effect."""
    if code is None:
        return "cannot be killed: it is stuck in the kernel"
    if code >= 0:
        return f"exited with code {code} and no result"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class MemoryWatch:
    """Whether a process that dies of SIGKILL was killed by the kernel, because memory ran out since this was made."""

    def __init__(self) -> None:
        self._kills = oom_kills()
        self._low = False

    def look(self) -> None:
        """Note whether the host's memory is nearly exhausted; to be called while the process lives."""
        memory = psutil.virtual_memory()
        self._low = memory.available < _LOW_MEMORY * memory.total

    def killed(self, code: int | None) -> bool:
        """Whether a process with this exit code was killed for memory."""
        return code == -signal.SIGKILL and (self._low or oom_kills() > self._kills)


def oom_kills() -> int:
    """A number that rises with every OOM kill by the kernel that this process can see; counters may overlap."""
    count = 0
    for path in _oom_counters():
        with contextlib.suppress(OSError):
            lines = (line.split() for line in path.read_text().splitlines())
            count += sum(int(line[1]) for line in lines if line[:1] == ["oom_kill"])
    return count


def _oom_counters() -> Iterator[Path]:
    """Files with OOM-kill counts: the host's, and the ones of this process's control groups (versions 2 and 1)."""
    yield Path("/proc/vmstat")
    yield _CGROUPS / "memory.events"  # a container's own group, mounted at the root
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield _CGROUPS / path.lstrip("/") / "memory.events"
            elif "memory" in controllers.split(","):
                yield _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"


def tail(log: Path, lines: int) -> str:
    """The last lines of a log, which may have gigabytes; "" where there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""


def snapshot(tree: Sequence[psutil.Process]) -> dict[str, str]:
    """Stacks of the process tree, its processes, host memory and GPUs: artifact name -> text."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    files = {
        "stacks.txt": "\n".join(dumps(tree)),
        "processes.txt": "\n".join(map(_describe, tree)) + "\n",
        "memory.txt": (
            f"memory: {memory.total >> 20} MiB, available {memory.available >> 20} MiB\n"
            f"swap: {swap.total >> 20} MiB, used {swap.used >> 20} MiB\n"
            f"load: {' '.join(f'{load:.2f}' for load in os.getloadavg())}\n"
        ),
    }
    if shutil.which("nvidia-smi"):
        files["nvidia-smi.txt"] = _tool(["nvidia-smi"])[1] + _tool(["nvidia-smi", "-q", "-d", "MEMORY,PERFORMANCE"])[1]
    return files


def request_stacks(tree: Sequence[psutil.Process]) -> None:
    """Make the processes that offer it write their Python stacks to their stderr.

    Works where py-spy may not attach, and while the GIL is held.
    """
    if [process for process in tree if stacks.ask(process.pid)]:
        time.sleep(_WRITING_S)


def dumps(processes: Sequence[psutil.Process]) -> list[str]:
    """Stacks of each process's threads by py-spy, under a title; else what the kernel knows.

    Some processes at a time: py-spy waits for one that is stuck in the kernel for all of TOOL_S. Those not reached
    within DUMPS_S are listed as skipped.
    """
    deadline = time.monotonic() + DUMPS_S

    def dump(process: psutil.Process) -> str:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return f"=== pid {process.pid}\nnot read within the {DUMPS_S:g} s for all processes\n"
        title = f"=== pid {process.pid}: {_command(process)}"
        code, text = _py_spy_dump(process.pid, within=min(TOOL_S, remaining))
        if code:  # not Python, or gone: the kernel may still know where it waits
            with contextlib.suppress(OSError):
                text += f"kernel: waiting in {Path(f'/proc/{process.pid}/wchan').read_text() or 'user space'}\n"
        return f"{title}\n{text}"

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(dump, processes))


class UnreadableStackError(Exception):
    """A process whose stack could not be read; its text is the reason."""


def frames(pid: int, most: int = 6) -> list[str]:
    """Innermost Python frames of a process's main work, read without stopping it.

    Its main work is the thread that is named as a rank, else the main thread.

    Raises:
        UnreadableStackError: it has no Python, is gone, is another user's, or changed its stack in each of some reads.
    """
    reason = ""
    for _ in range(_READS):
        code, text = _py_spy_dump(pid, "--nonblocking")
        threads = [block.splitlines() for block in re.split(r"\n(?=Thread )", text)[1:]]
        for title in (': "rank ', '"MainThread"', f"Thread {pid} "):
            for lines in threads if code == 0 else ():
                if title in f"{lines[0]} " and lines[1:]:
                    return [line.strip() for line in lines[1 : most + 1]]
        reason = "no Python" if code == 0 else " ".join(text.split())[:200]
        if not psutil.pid_exists(pid):
            break
    raise UnreadableStackError(reason)


def py_spy() -> str | None:
    """Path of py-spy, on the PATH or beside this interpreter; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


def _py_spy_dump(pid: int, *options: str, within: float = TOOL_S) -> tuple[int, str]:
    """Exit code and output of py-spy on a process."""
    tool = py_spy()
    return _tool([tool, "dump", *options, "--pid", str(pid)], within) if tool else (1, f"{NO_PY_SPY}\n")


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            rss, times = process.memory_info().rss >> 20, process.cpu_times()
            return (
                f"pid {process.pid} parent {process.ppid()} {process.status()} threads {process.num_threads()} "
                f"rss {rss} MiB cpu {times.user + times.system:.1f} s: {_command(process)}"
            )
    except psutil.Error as err:
        return f"pid {process.pid}: {err}"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "gone"


def _tool(command: Sequence[str], within: float | None = None) -> tuple[int, str]:
    """Exit code and output of a tool, which has `within` seconds, else TOOL_S.

    It is not waited for long once killed: nvidia-smi that is stuck in the GPU's driver does not die.
    """
    try:
        tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError as err:
        return 1, f"{command[0]}: {err}\n"
    try:
        out, errors = tool.communicate(timeout=TOOL_S if within is None else within)
        return tool.returncode, out + errors
    except subprocess.TimeoutExpired as err:
        tool.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tool.wait(_DEATH_S)
        return 1, f"{command[0]}: {err}\n"
    finally:
        for pipe in (tool.stdout, tool.stderr):
            if pipe is not None:
                pipe.close()
