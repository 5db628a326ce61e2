"""Describes a process tree before it is killed, and finds the cause of a death."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil

from jobs.process import stacks

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


def oom_kills() -> int:
    """A number that rises with every OOM kill by the kernel of this host, by its own limit or a control group's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


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
        "stacks.txt": "\n".join(stacks.dumps(tree)),
        "processes.txt": "\n".join(map(_describe, tree)) + "\n",
        "memory.txt": (
            f"memory: {memory.total >> 20} MiB, available {memory.available >> 20} MiB\n"
            f"swap: {swap.total >> 20} MiB, used {swap.used >> 20} MiB\n"
            f"load: {' '.join(f'{load:.2f}' for load in os.getloadavg())}\n"
        ),
    }
    if shutil.which("nvidia-smi"):
        files["nvidia-smi.txt"] = "".join(
            stacks.run_tool(["nvidia-smi", *options])[1] for options in ([], ["-q", "-d", "MEMORY,PERFORMANCE"])
        )
    return files


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            rss, times = process.memory_info().rss >> 20, process.cpu_times()
            return (
                f"pid {process.pid} parent {process.ppid()} {process.status()} threads {process.num_threads()} "
                f"rss {rss} MiB cpu {times.user + times.system:.1f} s: {stacks.command_line(process)}"
            )
    except psutil.Error as err:
        return f"pid {process.pid}: {err}"
