"""State of a rank: its place, its memory by phase, the kernels that run. Plain data, kept while a training runs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch.cuda import nccl

from jobs.hardware.machine import installed
from jobs.hardware.topology import cores_of
from jobs.measure.memory import resident_bytes
from jobs.schema.point import Beat, reporter
from jobs.training.live import memory_mib

BOOT, LOADER, FIRST_STEP, NOW = "boot", "loader", "step_1", "now"
PHASES = {BOOT: "at boot", LOADER: "after the loader", FIRST_STEP: "at step 1", NOW: "now"}
"""Moments at which a rank's memory is noted, and their words."""

Number = Annotated[int, Field(ge=0, lt=2**63)]
Cores = Annotated[str, Field(pattern=r"^(\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*)?$")]


@dataclass(frozen=True)
class Memory:
    """Memory of a rank's process [MiB]; None where it is unknown."""

    resident: float | None  # in the host's memory
    allocated: float | None = None  # most that PyTorch's tensors took on the GPU so far
    reserved: float | None = None  # held on the GPU by PyTorch's allocator


@dataclass(frozen=True)
class RankState:
    """State of a rank."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    rank: Number
    ranks: Number
    step: Number  # steps done
    host: str
    pid: Number
    process: str  # its `identity`
    device: str
    gpu: str  # its UUID; "" on a CPU
    cores: Cores  # that it may run on ("0-3,8")
    threads: Number
    route: Mapping[str, str] = field(default_factory=dict)  # kernels that really ran, by branch
    versions: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, Memory] = field(default_factory=dict)  # by phase (PHASES)

    @classmethod
    def from_json(cls, text: str) -> RankState | None:
        """The state in a file's text; None if it is torn, or was written by other code."""
        try:
            return _STATE.validate_json(text)
        except ValidationError:
            return None


_STATE = TypeAdapter(RankState)


def identity(pid: int) -> str | None:
    """The process of this number, told from every other one of any host; None if there is none, or not on Linux."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    boot, namespace = socket.gethostname(), ""
    with contextlib.suppress(OSError):  # a sandbox may hide either
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # of the kernel's start
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{boot} {namespace} {pid} {started}"


@dataclass
class Notes:
    """Notes on the memory of this process, a rank; its state is kept as a file of the point at its first step."""

    beat: Beat
    device: torch.device
    rank: int
    ranks: int
    memory: dict[str, Memory] = field(default_factory=dict)  # by phase

    def note(self, phase: str) -> None:
        """Note the present memory; waits for no GPU."""
        gpu: list[float] = []
        if self.device.type == "cuda":
            gpu = [round(memory_mib(self.device), 1), round(torch.cuda.memory_reserved(self.device) / 2**20, 1)]
        self.memory[phase] = Memory(round(resident_bytes() / 2**20, 1), *gpu)

    def first_step(self, step: int, route: Mapping[str, str]) -> None:
        """Note the memory, and keep the state."""
        self.note(FIRST_STEP)
        text = json.dumps(asdict(self.state(step, route)), separators=(",", ":"))
        reporter(self.beat).keep(f"rank{self.rank}.json", text)

    def state(self, step: int, route: Mapping[str, str]) -> RankState:
        pid, gpu = os.getpid(), ""
        if self.device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(self.device).uuid)
            gpu = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        packages = ("torch", "triton", "flash-attn", "flash-attn-4", "ray")
        versions = {name: version for name in packages if (version := installed(name))}
        if torch.cuda.is_available():
            versions |= {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, nccl.version()))}
        return RankState(
            rank=self.rank,
            ranks=self.ranks,
            step=step,
            host=socket.gethostname(),
            pid=pid,
            process=identity(pid) or "",
            device=self.device.type,
            gpu=gpu,
            cores=cores_of(pid),
            threads=torch.get_num_threads(),
            route=dict(route),
            versions=versions,
            memory=dict(self.memory),
        )
