"""Looks at processes before they are killed, and for the cause of a death.

Stacks are read by py-spy, or written by the processes themselves when a signal asks for them.
"""

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

_TOOL_S = 20.0  # that py-spy and nvidia-smi have
_DUMPS_S = _TOOL_S + 5.0  # that py-spy has for all processes: more than for the first few, which may all be stuck
_DEATH_S = 1.0
_WRITING_S = 0.5  # until stacks are written, and those of ranks have reached the point's stderr
STACKS_S = _WRITING_S + _DUMPS_S + _DEATH_S  # seconds after which `dumps` has ended
NO_PY_SPY = "py-spy is not installed on this host: pip install py-spy"

_TAIL_BYTES = 1 << 16
_AT_A_TIME = 8
_READS = 4  # of a stack that changes while it is read: seen to fail once in two

# A real-time signal, which macOS has not, because LLVM, by which Triton compiles, takes SIGUSR1 and SIGUSR2 for itself.
_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


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


def child_runs(pid: int) -> bool:
    """Whether this child of this process runs; does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # reaped by another
        return False


def oom_kills() -> int:
    """A number that rises with every OOM kill by the kernel of this host, by its own limit or a control group's."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def waited_s(pid: int) -> float:
    """Seconds for which a process's threads could have run while others had the processors; 0 if it is not known."""
    waited = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            waited += int(thread.read_text().split()[1])
    return waited / 1e9


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
        files["nvidia-smi.txt"] = "".join(
            run_tool(["nvidia-smi", *options])[1] for options in ([], ["-q", "-d", "MEMORY,PERFORMANCE"])
        )
    return files


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            rss, times = process.memory_info().rss >> 20, process.cpu_times()
            return (
                f"pid {process.pid} parent {process.ppid()} {process.status()} threads {process.num_threads()} "
                f"rss {rss} MiB cpu {times.user + times.system:.1f} s: {command_line(process)}"
            )
    except psutil.Error as err:
        return f"pid {process.pid}: {err}"


def offer_stacks() -> None:
    """Have this process write its stacks to its stderr when it crashes and on `dumps`, also while the GIL is held."""
    faulthandler.enable()
    faulthandler.register(_SIGNAL, all_threads=True)


def _request_stacks(processes: Sequence[psutil.Process]) -> dict[int, str]:
    """Make the processes that offer it write their Python stacks to their stderr.

    Returns what each wrote, by process id, if its stderr is a file; processes that share one have the text of all.
    """
    with contextlib.ExitStack() as block:
        files = {}
        for process in processes:
            stderr = f"/proc/{process.pid}/fd/2"
            with contextlib.suppress(OSError):  # it is gone, or another user's
                status = Path(f"/proc/{process.pid}/status").read_text()
                caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
                if caught is None or not int(caught[1], 16) >> (_SIGNAL - 1) & 1:
                    continue  # one that does not offer it would die of the signal
                if stat.S_ISREG(os.stat(stderr).st_mode):
                    file = block.enter_context(open(stderr, "rb"))
                    file.seek(0, os.SEEK_END)
                    files[process.pid] = file
                os.kill(process.pid, _SIGNAL)
        time.sleep(_WRITING_S)
        return {pid: file.read().decode(errors="replace") for pid, file in files.items()}


def dumps(processes: Sequence[psutil.Process]) -> list[str]:
    """Stacks of each process's threads by py-spy, under a title; where it fails, as the process wrote them itself.

    Some processes at a time: py-spy waits long for one that is stuck in the kernel. Those not reached are listed.
    """
    written, tool = _request_stacks(processes), py_spy() or "py-spy"
    deadline = time.monotonic() + _DUMPS_S

    def dump(process: psutil.Process) -> str:
        own = written.get(process.pid, "")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return f"=== pid {process.pid}\nnot read within the {_DUMPS_S:g} s for all processes\n{own}"
        title = f"=== pid {process.pid}: {command_line(process)}"
        code, text = run_tool([tool, "dump", "--pid", str(process.pid)], min(_TOOL_S, remaining))
        if code:  # not Python, gone, or not to be attached to: the kernel may still know where it waits
            with contextlib.suppress(OSError):
                text += f"kernel: waiting in {Path(f'/proc/{process.pid}/wchan').read_text() or 'user space'}\n"
            text += own
        return f"{title}\n{text}"

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(dump, processes))


class UnreadableStackError(Exception):
    """Its text is the reason why a process's stack could not be read."""


def frames(pid: int, most: int = 6) -> list[str]:
    """Innermost Python frames of a process's thread that is named as a rank, else of its main one; it is not stopped.

    Raises UnreadableStackError: it has no Python, is gone, is another user's, or changes its stack in each of some
    reads.
    """
    reason = ""
    for _ in range(_READS):
        code, text = run_tool([py_spy() or "py-spy", "dump", "--nonblocking", "--pid", str(pid)])
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


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "gone"


def run_tool(command: Sequence[str], within: float | None = None) -> tuple[int, str]:
    """Exit code and output of a tool, which has `within` seconds, else _TOOL_S."""
    try:
        tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as err:
        if command[0] == "py-spy":  # it is not beside the interpreter, nor on the PATH
            return 1, f"{NO_PY_SPY}\n"
        return 1, f"{command[0]}: {err}\n"
    assert tool.stdout is not None
    with tool.stdout:
        try:
            out, _ = tool.communicate(timeout=within or _TOOL_S)
            return tool.returncode, out
        except subprocess.TimeoutExpired as err:
            tool.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # nvidia-smi, stuck in the GPU's driver, does not die
                tool.wait(_DEATH_S)
            return 1, f"{command[0]}: {err}\n"
