"""A record of the kernel that really computed each branch, and the ranges of branches and stages in a profile.

Every backend calls `note` where it does the work, so that a capture shows the kernels executed, not those requested.
torch.compile calls it while it traces: a capture around the compiling call shows the kernels of every later call.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch._C._profiler import _RecordFunctionFast

from ._decorators import constant

Branch = Literal["cmp", "slc", "win", "select", "dense"]
BRANCHES: tuple[Branch, ...] = ("cmp", "slc", "win")
RANGE = "nsa_core."  # start of the names of ranges in a profile


@dataclass(frozen=True)
class BranchRun:
    """One execution of a branch, and the kernel that computed it ("chunked", "sdpa-flash", ...)."""

    branch: Branch
    kernel: str


_captures: ContextVar[tuple[list[BranchRun], ...]] = ContextVar("nsa_core_captures", default=())


@contextmanager
def capture() -> Iterator[list[BranchRun]]:
    """Collect the branch runs of this context, in order. Captures nest: the outer one sees the inner one's runs."""
    runs: list[BranchRun] = []
    token = _captures.set((*_captures.get(), runs))
    try:
        yield runs
    finally:
        _captures.reset(token)


@constant  # traced code calls it once instead of tracing into it
def note(branch: Branch, kernel: str) -> None:
    """Record that `kernel` computes `branch` now. For backends; costs nothing without a capture."""
    for runs in _captures.get():
        runs.append(BranchRun(branch, kernel))


def route_of(call: Callable[[], object]) -> dict[str, str]:
    """Run `call` once; returns the kernel of every executed branch, several kernels of a branch joined by "+"."""
    with capture() as runs:
        call()
    route: dict[str, dict[str, None]] = {}
    for run in runs:
        route.setdefault(run.branch, {})[run.kernel] = None
    return {branch: "+".join(kernels) for branch, kernels in route.items()}


def profiled(branches: tuple[Branch, ...]) -> AbstractContextManager[object]:
    """A range of torch.profiler around branches that are computed at once; nothing without a profiler."""
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(RANGE + "_".join(branches))


def profiled_stage(stage: str) -> AbstractContextManager[object]:
    """A range of torch.profiler around one launch of a stage of the Triton kernels. For callers under a profiler.

    It counts as an operation: the profiler gives a kernel's time to the innermost operation and all those around it,
    and none to a record_function between the kernel and its operation, here autograd's function.
    """
    return _RecordFunctionFast(RANGE + stage)
