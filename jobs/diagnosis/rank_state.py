"""State of a rank: its place, its memory by phase, the kernels that run. Plain data, kept while a training runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import psutil
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch.cuda import nccl

from jobs.hardware.machine import installed
from jobs.hardware.topology import cores_of, ranges
from jobs.schema.point import Beat, reporter
from jobs.training.live import memory_mib

BOOT, LOADER, FIRST_STEP, NOW = "boot", "loader", "step_1", "now"
PHASES = {BOOT: "at boot", LOADER: "after the loader", FIRST_STEP: "at step 1", NOW: "now"}
"""Moments at which a rank's memory is noted, and their words."""

_CORES = re.compile(r"(\d{1,6}(-\d{1,6})?(,(?=\d)|$))*")
_PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "ray")


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's process [MiB].

    Attributes:
        resident: in the host's memory; None if unknown.
        allocated: most that PyTorch's tensors took on the GPU so far; None on a CPU.
        reserved: held on the GPU by PyTorch's allocator; None on a CPU.
    """

    resident: float | None
    allocated: float | None = None
    reserved: float | None = None


@dataclass(frozen=True)
class RankState:
    """State of a rank.

    Attributes:
        step: steps done.
        process: identity of its process (`identity`).
        gpu: UUID of its GPU; "" on a CPU.
        cores: cores that it may run on, as ranges ("0-3,8").
        route: kernels that really ran, by branch.
        memory: by phase (PHASES).
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    rank: int
    ranks: int
    step: int
    host: str
    pid: int
    process: str
    device: str
    gpu: str
    cores: str
    threads: int
    route: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, Memory] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RankState | None:
        """The state in a file's text; None if it is torn, or was written by other code."""
        try:
            state = _STATE.validate_json(text)
        except ValidationError:
            return None
        numbers = (state.rank, state.ranks, state.step, state.pid, state.threads)
        sound = all(0 <= number < 2**63 for number in numbers) and _CORES.fullmatch(state.cores)
        return state if sound else None


_STATE = TypeAdapter(RankState)


def file_name(rank: int) -> str:
    """Name of the file with a rank's state; those of an attempt's further processes are numbered by Reporter.keep."""
    return f"rank{rank}.json"


def identity(pid: int) -> str | None:
    """The process of this number, told from every other one of any host; None if there is none, or not on Linux."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # of the kernel's start
    except OSError:  # of a sandbox
        boot = socket.gethostname()
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace} {pid} {started}"


class Notes:
    """Notes on the memory of this process, a rank; its state is kept as a file of the point at its first step."""

    def __init__(self, beat: Beat, device: torch.device, rank: int, ranks: int) -> None:
        self._report = reporter(beat)
        self._device = device
        self._rank, self._ranks = rank, ranks
        self._memory: dict[str, Memory] = {}

    def note(self, phase: str) -> None:
        """Note the present memory; waits for no GPU."""
        resident = round(psutil.Process().memory_info().rss / 2**20, 1)
        if self._device.type != "cuda":
            self._memory[phase] = Memory(resident)
            return
        reserved = torch.cuda.memory_reserved(self._device) / 2**20
        self._memory[phase] = Memory(resident, round(memory_mib(self._device), 1), round(reserved, 1))

    def first_step(self, step: int, route: Mapping[str, str]) -> None:
        self.note(FIRST_STEP)
        self._report.keep(file_name(self._rank), self.state(step, route).to_json())

    def state(self, step: int, route: Mapping[str, str]) -> RankState:
        """The state of this rank."""
        pid, gpu = os.getpid(), ""
        if self._device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            gpu = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return RankState(
            rank=self._rank,
            ranks=self._ranks,
            step=step,
            host=socket.gethostname(),
            pid=pid,
            process=identity(pid) or "",
            device=self._device.type,
            gpu=gpu,
            cores=ranges(cores_of(pid)),
            threads=torch.get_num_threads(),
            route=dict(route),
            versions=_versions(),
            memory=dict(self._memory),
        )


def _versions() -> dict[str, str]:
    found = {name: version for name in _PACKAGES if (version := installed(name))}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found
