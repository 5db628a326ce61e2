"""A trial: a function in a process of its own, whose hang, crash or lack of memory is a result and not the end."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.process import messages, stacks
from jobs.process.child import Child
from jobs.process.messages import CallFunction, Command, Returned
from jobs.process.reporter import ProcessReporter
from jobs.process.watch import DeadlineWatch, Limits
from jobs.process.worker import Channel
from jobs.schema.point import Beat
from jobs.schema.states import PointState

_BEAT_S = 1.0  # between two repeated signs of progress: the trial's own deadlines are held here


@dataclass(frozen=True)
class Trial:
    """End of a trial.

    Attributes:
        end: how it ended.
        reason: why it is not ok, in one line; empty if it is.
        seconds: its duration, start of the process included.
        value: what the call returned; {} if it did not.
        stderr: the last lines printed; they end with the traceback of an error, or the stacks of all threads of a hang.
    """

    end: PointState
    reason: str
    seconds: float
    value: Mapping[str, Any]
    stderr: str

    def needed(self, name: str, failure: type[Exception]) -> Mapping[str, Any]:
        """Result of the call, for a point that is nothing without it; else its stderr is printed.

        Args:
            name: the trial's name in messages.

        Raises:
            MemoryError: memory ran out there.
            failure: it ended in another way.
        """
        if self.end is PointState.OK:
            return self.value
        print(f"{name}:\n{self.stderr}", file=sys.stderr)
        if self.end is PointState.OOM:
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
    begun, repeated = time.monotonic(), 0.0
    progress = messages.Beat("start of its process")
    # What it leaves about a failure lies where this process's is looked for.
    env = {"TMPDIR": tempfile.gettempdir(), **toolchain.env}
    child = Child("jobs.process.trial:answer", env=env, python=toolchain.python)
    try:
        child.send(CallFunction(function, config, gpu_share))
        watch, ended = DeadlineWatch(child, limits), None
        while ended is None:
            events, ended = watch.step()
            for event in events:
                if isinstance(event, messages.Beat):
                    progress, repeated = event, 0.0
            if time.monotonic() - repeated >= _BEAT_S:
                repeated = time.monotonic()
                beat(progress.phase, progress.done, progress.total)
        if ended.expired:
            stacks.request(child.tree())
        reason = ended.reason or ""
        if ended.state is PointState.CRASH:
            reason += f" (last in phase {progress.phase!r})"
        returned = ended.result.value if isinstance(ended.result, Returned) else {}
        return Trial(ended.state, reason, time.monotonic() - begun, returned, child.tail())
    finally:
        child.discard()


def answer(command: Command, channel: Channel) -> Returned:
    """Call the function, in the trial's process."""
    assert isinstance(command, CallFunction)
    module, _, name = command.function.partition(":")
    try:
        called: Callable[..., Mapping[str, Any]] = getattr(importlib.import_module(module), name)
        if command.gpu_share is not None:
            import torch

            torch.cuda.set_per_process_memory_fraction(command.gpu_share)
        return Returned(called(command.config, ProcessReporter(channel.send)))
    except Exception:
        traceback.print_exc()
        raise
