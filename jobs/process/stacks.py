"""Stacks of all threads of a process, which it writes to its stderr when it is asked by a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from pathlib import Path

# A real-time signal, which macOS has not, because LLVM, by which Triton compiles, takes SIGUSR1 and SIGUSR2 for itself.
_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1


def offer() -> None:
    """Have this process write its stacks whenever `ask` asks it, also while a thread holds the GIL."""
    faulthandler.register(_SIGNAL, all_threads=True)


def ask(pid: int) -> bool:
    """Ask a process for its stacks. Returns whether it offers them; one that does not would die of the signal."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        if caught is not None and int(caught[1], 16) >> (_SIGNAL - 1) & 1:
            os.kill(pid, _SIGNAL)
            return True
    return False
