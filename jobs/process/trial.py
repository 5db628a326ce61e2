"""A trial: a call in a process of its own, whose hang, crash or lack of memory is a result and not the end.

The process stays in its parent's group, and ends with it. `python -m jobs.process.trial FD` is its beginning: it reads
what to call from stdin and writes messages, a line of JSON each, to the pipe FD.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from jobs.process import stacks
from jobs.process.exhaustion import ran_out_of_memory
from jobs.process.interpreter import variables_for_another
from jobs.schema.point import Beat

_POLL_S = 0.2
_BEAT_S = 1.0  # between two repeated signs of progress: the trial's own deadlines are held here
_DUMP_S = 0.5  # for a hung process to write its stacks
_REAP_S = 30
_TAIL = 200  # lines of stderr
_OURS = [Path(__file__).parents[2] / package for package in ("jobs", "nsa_core")]


class End(StrEnum):
    """The way in which a trial ended."""

    OK = "ok"
    OOM = "oom"
    HANG = "hang"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"


@dataclass(frozen=True)
class Limits:
    """Seconds until the first sign of progress, between two signs, and for the whole trial."""

    startup_s: float
    heartbeat_s: float
    whole_s: float


@dataclass(frozen=True)
class Trial:
    """End of a trial.

    Attributes:
        end: how it ended.
        reason: why it is not ok, in one line; empty if it is.
        seconds: its duration, start of the process included.
        found: what the call returned; {} if it did not.
        stderr: the last lines printed there; they end with the traceback of an error, or the stacks of all threads of a
            hang.
    """

    end: End
    reason: str
    seconds: float
    found: Mapping[str, Any]
    stderr: str

    def needed(self, name: str, failure: type[Exception]) -> Mapping[str, Any]:
        """Result of the call, for a point that is nothing without it; else its stderr is printed.

        Args:
            name: the trial's name in messages.

        Raises:
            MemoryError: memory ran out there.
            failure: it ended in another way.
        """
        if self.end is End.OK:
            return self.found
        print(f"{name}:\n{self.stderr}", file=sys.stderr)
        if self.end is End.OOM:
            raise MemoryError(f"{name}: {self.reason}")
        raise failure(f"{name}: {self.end}: {self.reason}")


@dataclass(frozen=True)
class Toolchain:
    """Surroundings of a trial's process.

    Attributes:
        python: path of its interpreter, which has packages of its own; None: this process's.
        env: environment variables that are set for it.
    """

    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


_THIS = Toolchain()


def run_trial(
    function: str,
    config: Mapping[str, Any],
    limits: Limits,
    beat: Beat,
    gpu_share: float | None = None,
    toolchain: Toolchain = _THIS,
) -> Trial:
    """Call a function in a process of its own.

    Args:
        function: "module:name" of a function of `config` and a Beat that returns a mapping for JSON.
        beat: gets the progress of the trial.
        gpu_share: share of the GPU's memory that it may use; None: all.

    Raises:
        OSError: the toolchain's interpreter cannot be started.
    """
    with (
        tempfile.TemporaryFile("w+", prefix="trial-", errors="replace") as stderr,
        tempfile.TemporaryDirectory(prefix="trial-") as folder,
    ):
        process = _Process(json.dumps([function, dict(config), gpu_share]), stderr, toolchain, Path(folder))
        try:
            end, reason, found = _follow(process, limits, beat)
        finally:
            process.kill()
        stderr.seek(0)
        tail = "\n".join(stderr.read().splitlines()[-_TAIL:])
    return Trial(end, reason, time.monotonic() - process.started, found, tail)


def own_gpu_share(device: str) -> float | None:
    """Share of the GPU's memory that this process may use, for its trials; None without a limit."""
    if device != "cuda":
        return None
    import torch  # late: a trial's process may do without it

    if not torch.cuda.is_initialized():  # so nobody has set a limit, and CUDA is left to the trials
        return None
    share = torch.cuda.get_per_process_memory_fraction()
    return share if share < 1 else None


class _Process:
    """The trial's process, from outside."""

    def __init__(self, order: str, stderr: Any, toolchain: Toolchain, folder: Path) -> None:
        self.started = time.monotonic()
        variables = dict(os.environ)
        if toolchain.python is not None:
            variables = variables_for_another(variables, _OURS, folder / "sources")
        self._messages, messages = os.pipe()
        try:
            self._process = subprocess.Popen(
                [toolchain.python or sys.executable, "-m", "jobs.process.trial", str(messages)],
                stdin=subprocess.PIPE,
                stdout=stderr,
                stderr=stderr,
                env=variables | dict(toolchain.env),
                pass_fds=(messages,),
            )
        except OSError:
            os.close(self._messages)
            raise
        finally:
            os.close(messages)
        self._rest = b""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(order.encode())

    def messages(self) -> Iterator[list[Any]]:
        """Messages that arrived; waits a little for the first."""
        if select.select([self._messages], [], [], _POLL_S)[0]:
            chunk = os.read(self._messages, 1 << 20)
            self._rest += chunk
            if not chunk:
                time.sleep(_POLL_S)  # end of file stays readable until the process is gone
        *lines, self._rest = self._rest.split(b"\n")
        return map(json.loads, lines)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def dump_stacks(self) -> None:
        stacks.ask(self._process.pid)
        time.sleep(_DUMP_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_REAP_S)
        os.close(self._messages)


def _follow(process: _Process, limits: Limits, beat: Beat) -> tuple[End, str, Mapping[str, Any]]:
    """End of the trial, its reason and findings."""
    last, phase, told = process.started, ("start of its process", 0, 0), 0.0
    begun = False
    while True:
        code = process.exit_code()  # before reading: what a process says that ends now is still read
        for kind, *rest in process.messages():
            if kind == "found":
                return End.OK, "", rest[0]
            if kind == "failed":
                return End(rest[0]), rest[1], {}
            last, phase, begun, told = time.monotonic(), (rest[0], rest[1], rest[2]), True, 0.0
        clock = time.monotonic()
        if clock - told >= _BEAT_S:
            told = clock
            beat(*phase)
        if code is not None:
            return End.CRASH, f"{_exit(code)} (last in phase {phase[0]!r})", {}
        silent = limits.heartbeat_s if begun else limits.startup_s
        if clock - last > silent:
            process.dump_stacks()
            return End.HANG, f"no progress for {silent:g} s (last in phase {phase[0]!r})", {}
        if clock - process.started > limits.whole_s:
            process.dump_stacks()
            return End.TIMEOUT, f"not done after {limits.whole_s:g} s (last in phase {phase[0]!r})", {}


def _exit(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as by the kernel when memory runs out"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code} and no result"


def main(argv: list[str]) -> None:
    """The process of a trial."""
    pipe = int(argv[1])
    os.set_inheritable(pipe, False)
    faulthandler.enable()
    stacks.offer()

    def send(*message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(pipe, data) :]

    function, config, gpu_share = json.loads(sys.stdin.read())
    try:
        send(
            "found", _call(function, config, gpu_share, lambda phase, done=0, total=0: send("beat", phase, done, total))
        )
    except Exception as err:
        with suppress(MemoryError):
            traceback.print_exc()  # before the end is told, as the process is killed then
        first, *_ = str(err).strip().splitlines() or [""]
        send("failed", End.OOM if ran_out_of_memory(err) else End.ERROR, f"{type(err).__name__}: {first}")


def _call(function: str, config: Mapping[str, Any], gpu_share: float | None, beat: Beat) -> Mapping[str, Any]:
    module, _, name = function.partition(":")
    called: Callable[..., Mapping[str, Any]] = getattr(importlib.import_module(module), name)
    if gpu_share is not None:
        import torch

        torch.cuda.set_per_process_memory_fraction(gpu_share)
    return called(config, beat)


if __name__ == "__main__":
    main(sys.argv)
