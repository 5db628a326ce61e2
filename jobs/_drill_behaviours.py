"""Behaviours of the points of kind drill, which most of them do not survive."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jobs.schema.point import Beat


def _ok(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Do a little work on the device."""
    torch.ones(8, device=device).sum().item()


def _slow(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Take long but report progress: slow is not hung."""
    steps = max(1, round(config["slow_s"] / 0.2))
    for done in range(steps):
        beat("working slowly", done, steps)
        time.sleep(config["slow_s"] / steps)


def _hang(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Sleep forever without reporting progress."""
    while True:
        time.sleep(3600)


def _timeout(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Report progress forever, so that only the point's deadline ends it."""
    done = 0
    while True:
        done += 1
        beat("working without end", done)
        time.sleep(0.2)


def _crash(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """End by SIGKILL, as under the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """End with exit code 0 but without a result: not a success."""
    os._exit(0)


def _oom(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Allocate 1 PiB, for PyTorch's own out-of-memory error without harm to the host."""
    torch.empty(2**50, dtype=torch.int8, device=device)


def _raise(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    raise RuntimeError("raised on purpose")


def _spin(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Wait for a kernel that runs for years: the process is stuck in the driver, and the GPU is busy."""
    torch.cuda._sleep(2**62)  # pyright: ignore[reportPrivateUsage] - clock cycles
    torch.cuda.synchronize(device)


def _fill(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Take the card's memory, a GiB at a time, until there is none left."""
    taken: list[torch.Tensor] = []
    while True:
        taken.append(torch.zeros(2**30, dtype=torch.int8, device=device))


def _assert(config: Mapping[str, Any], device: torch.device, beat: Beat) -> None:
    """Read beyond a tensor's end: the assertion in the kernel leaves a CUDA context that runs nothing any more."""
    torch.zeros(1, device=device)[torch.ones(1, dtype=torch.int64, device=device)]
    torch.cuda.synchronize(device)


BEHAVIOURS: Mapping[str, Callable[[Mapping[str, Any], torch.device, Beat], None]] = {
    "ok": _ok,
    "slow": _slow,
    "hang": _hang,
    "timeout": _timeout,
    "crash": _crash,
    "exit": _exit,
    "oom": _oom,
    "raise": _raise,
    "spin": _spin,
    "fill": _fill,
    "assert": _assert,
}
