"""The ranks of a point on their nodes, and the actor that samples those of one node."""

import asyncio
import contextlib
import os
import pickle
import queue
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from jobs.hardware import nvml
from jobs.hardware.telemetry import ProcessUsage, Sample, Telemetry, stop_all
from jobs.process import post_mortem, temporary
from jobs.process.memory_limit import memory_limit
from jobs.process.messages import Cluster, MeasurePoint, RankFailure
from jobs.schema.point import Device, Rank, Samples
from orchestrator.execute.gpu_release import Gpus
from orchestrator.execute.point import describe

_TAIL = 40  # lines of a failed rank's traceback
_SEND_S = 0.2


@dataclass(frozen=True)
class Placed:
    """Where a rank runs, its first message."""

    rank: int
    node: str  # Ray's id; `host` is the node's name
    host: str
    pid: int
    gpu: str | None  # NVML's id; None on a CPU
    folder: str  # as jobs.schema.point.Rank
    environment: Mapping[str, Any]  # of the point, from its first rank; {} of the others


@dataclass(frozen=True)
class Returned:
    """The result of a rank."""

    rank: int
    result: Any


@dataclass(frozen=True)
class Raised:
    """An exception ended a rank; `tail` is the end of its traceback."""

    rank: int
    tail: str


class RankRaised(RuntimeError):  # noqa: N818  (an event)
    """The exception of a rank, as text: its own class may not survive the way to another process."""


@dataclass(frozen=True)
class Work:
    """The work of each rank."""

    main: Callable[[Rank], Any]  # as jobs.schema.point.Launcher.run
    mailbox: Any  # handle of the Mailbox
    command: MeasurePoint
    cluster: Cluster


class NodeAgent:
    """Actor on a node with ranks, each of which has some cores: samples them from outside, looks at their stacks."""

    def __init__(self, ranks: Sequence[Placed], cores: float) -> None:
        self._ranks = ranks
        self._gpus = {placed.rank: Telemetry([placed.gpu]) for placed in ranks if placed.gpu is not None}
        self._usage = {p.rank: ProcessUsage([p.pid], cores) for p in ranks if p.gpu is None}
        for telemetry in self._gpus.values():
            telemetry.start()

    def readings(self) -> list[Samples]:
        """Readings of each rank's GPU, or on a CPU of its processes, since the last call."""
        meters = {**self._gpus, **self._usage}
        return [replace(reading, rank=rank) for rank, meter in meters.items() for reading in meter.readings()]

    def samples(self) -> list[Sample]:
        """All samples of the GPUs, which are named by host and NVML's id. Ends the sampling."""
        stop_all([*self._gpus.values()])
        samples = [sample for telemetry in self._gpus.values() for sample in telemetry.samples]
        return [replace(sample, gpu=f"{socket.gethostname()}:{sample.gpu}") for sample in samples]

    def explain(self) -> dict[str, str]:
        """Stacks of the ranks, and what they have written themselves: text by file name."""
        files: dict[str, str] = {}
        for placed in self._ranks:
            files |= {path.name: path.read_text(errors="replace") for path in Path(placed.folder).glob("*.json")}
            shutil.rmtree(placed.folder, ignore_errors=True)
        living = [placed for placed in self._ranks if psutil.pid_exists(placed.pid)]
        for placed, text in zip(living, post_mortem.dumps([psutil.Process(p.pid) for p in living]), strict=True):
            files[f"stacks-rank{placed.rank}.txt"] = f"node {placed.host}\n{text}"
        return files


def rank_main(settings: Mapping[str, Work]) -> None:
    """Do `settings["work"]` as the rank that Ray Train made of this process. Raises RankRaised."""
    import ray
    import ray.train

    work, command = settings["work"], settings["work"].command
    number = ray.train.get_context().get_world_rank()
    stop = threading.Event()
    post = Post(work.mailbox, stop)
    post_mortem.offer_stacks()
    try:
        device, gpu = _device(command.device)
        with contextlib.closing(temporary.Folder(temporary.RANK)) as own:
            node = ray.get_runtime_context().get_node_id()
            environment = describe(device, command.settings) if number == 0 else {}
            post(Placed(number, node, socket.gethostname(), os.getpid(), gpu, str(own.path), environment))
            if gpu is not None and (reason := Gpus(gpu).misfit(work.cluster.card)):
                raise RuntimeError(reason)
            with memory_limit(command.device, command.memory_bytes):
                result = work.main(Rank(number, device, post, stop, own.path))
        post(Returned(number, result))
    except BaseException as err:
        post(RankFailure.of(number, err))
        post(Raised(number, "\n".join(traceback.format_exc().splitlines()[-_TAIL:])))
        raise RankRaised(f"{type(err).__name__}: {err}") from None
    finally:
        post.close()


@dataclass
class Mailbox:
    """Actor with the ranks' messages and the stop request; pickled messages, which only PyTorch could read."""

    _messages: list[bytes] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _stopped: bool = False

    async def post(self, messages: Sequence[bytes]) -> bool:
        """Add messages of a rank. Returns whether the ranks are to end."""
        self._messages += messages
        if messages:
            self._arrived.set()
        return self._stopped

    async def receive(self, timeout: float) -> list[bytes]:
        """New messages, in the order of their arrival; waits up to `timeout` seconds for the first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout)
        self._arrived.clear()
        messages, self._messages = self._messages, []
        return messages

    async def stop(self) -> None:
        """Ask the ranks to end."""
        self._stopped = True


class Post:
    """Sends messages to the mailbox, in order and in the background; learns there whether the ranks are to end."""

    def __init__(self, mailbox: Any, stop: threading.Event) -> None:
        self._mailbox, self._stop = mailbox, stop
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="messages", daemon=True)
        self._thread.start()

    def __call__(self, message: Any) -> None:
        self._queue.put(pickle.dumps(message))

    def close(self) -> None:
        """Send what is queued, and end the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        messages: list[bytes] = []
        while True:
            last = self._closing.wait(_SEND_S)
            messages += [self._queue.get() for _ in range(self._queue.qsize())]
            try:
                if ray.get(self._mailbox.post.remote(messages)):
                    self._stop.set()
            except ActorUnavailableError:  # a fault of the network, which may pass
                time.sleep(_SEND_S)
                continue
            except RayError:  # the point's process is gone, and Ray ends this one
                return
            messages = []
            if last:
                return


def _device(kind: Device) -> tuple[str, str | None]:
    """PyTorch's name of the rank's device, and NVML's id of its GPU."""
    if kind == "cpu":
        return "cpu", None
    import ray.train.torch
    import torch

    device: Any = ray.train.torch.get_device()
    torch.cuda.set_device(device)
    return str(device), nvml.visible_gpus()[torch.cuda.current_device()]
