"""The process of one rank: trains, and reports beats and failures to the process that started it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from jobs.process import stacks
from jobs.process.messages import LONGEST_TEXT, Outbox, RankFailure, RankProcess
from jobs.process.reporter import ProcessReporter
from jobs.process.worker import end_with_parent
from jobs.schema.launcher import Rank
from jobs.schema.point import Surroundings
from jobs.training.case import TextCase
from jobs.training.errors import noting_sigterm
from jobs.training.report import RankReport, train_rank

T = TypeVar("T")

SILENCE_S = 5.0
"""Seconds without progress after which a rank writes what its flight recorder holds."""

COLLECTIVES = 2000
"""Entries of PyTorch's flight recorder."""

TIMEOUT = timedelta(days=1)
"""Time limit of a collective: only the supervisor, which knows the heartbeat deadline, can tell a stalled rank from a
slow one."""

SAMPLE_INTERVAL_S = 0.5
"""Seconds between two samples of a rank's series: the point's process thins them."""

_inner: Any = _distributed_c10d  # PyTorch 2.13 has no public way to write the flight recorder's JSON
_newer = hasattr(_inner, "_dump_fr_trace_json")  # it records gloo, too
FLIGHT_RECORDER_SIZE = "TORCH_FR_BUFFER_SIZE" if _newer else "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""The variable with the size of PyTorch's flight recorder."""

PROCESS_GROUP = {
    FLIGHT_RECORDER_SIZE: str(COLLECTIVES),
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # sums of gradients do not wait for the kernels of the backward pass beside them
}
"""Variables that PyTorch reads when a process group is formed; a user's own win."""

_dump: Callable[[], bytes] = _inner._dump_fr_trace_json if _newer else _inner._dump_nccl_trace_json


def missing_variables() -> dict[str, str]:
    """Variables of PROCESS_GROUP that the environment of this process lacks."""
    return {name: value for name, value in PROCESS_GROUP.items() if name not in os.environ}


def flight_record(rank: int) -> str:
    """Name of the file with the collectives of a rank, in JSON."""
    return f"flight-recorder-rank{rank}.json"


def train(case: TextCase, surroundings: Surroundings, rank: Rank) -> RankReport:
    """Train as one of the case's ranks; reports to the process that started them."""
    threading.current_thread().name = f"rank {rank.number}"  # seen in dumps of stacks
    rank.post(RankProcess(rank.number, os.getpid(), "joined"))
    report = ProcessReporter(
        rank.post, surroundings, rank=rank.number, interval=lambda _: SAMPLE_INTERVAL_S, longest=LONGEST_TEXT
    )
    try:
        with _recording_silence(report, rank.folder / flight_record(rank.number)):
            result = train_rank(case, torch.device(rank.device), rank.number, report, rank.stop)
            dist.barrier()  # nobody leaves while another still exchanges
            dist.destroy_process_group()
        report.close()
        rank.post(RankProcess(rank.number, os.getpid(), "done"))
        return result
    except BaseException as err:
        report.close()
        _fail(rank.post, rank.number, err)
        raise


def elastic_main(main: Callable[[Rank], T], pipe: Path, folder: Path, device: str, memory_fraction: float | None) -> T:
    """Run `main` as the rank that the elastic launcher's environment variables name. SIGTERM asks it to end; before all
    ranks have formed a group it ends at once.

    Args:
        pipe: the pipe to the process that started the ranks.
        folder: as Rank.folder.
        memory_fraction: share of the GPU's memory that the rank may use; None: no limit.
    """
    end_with_parent()
    number, post = int(os.environ["RANK"]), Outbox(os.open(pipe, os.O_WRONLY)).send
    stacks.offer()
    post(RankProcess(number, os.getpid(), "starting"))
    try:
        joined = _join(device, int(os.environ["LOCAL_RANK"]), memory_fraction)
    except BaseException as err:
        _fail(post, number, err)
        raise
    with noting_sigterm() as stop:
        return main(Rank(number, str(joined), post, stop, folder))


def _fail(post: Callable[[Any], None], rank: int, err: BaseException) -> None:
    post(RankFailure.of(rank, err))
    with contextlib.suppress(OSError):  # stderr is a file, whose disk may be full
        traceback.print_exc()


def _join(device: str, local_rank: int, memory_fraction: float | None) -> torch.device:
    """Form the process group with the other ranks. Returns this rank's device."""
    os.environ.update(missing_variables())
    if device == "cpu":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return torch.device("cpu")
    gpu = torch.device("cuda", local_rank)
    torch.cuda.set_device(gpu)
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(memory_fraction, gpu)
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=gpu)
    return gpu


@contextlib.contextmanager
def _recording_silence(report: ProcessReporter, path: Path) -> Iterator[None]:
    """Write the flight recorder to `path` whenever there was no progress for SILENCE_S, once for each silence.

    Not after the block: what waits for the process to end is no silence, and the path's folder may be removed by then.
    """
    ended = threading.Event()

    def watch() -> None:
        written = 0.0
        while not ended.wait(0.5):
            last = report.last_beat
            if last > written and time.monotonic() - last > SILENCE_S:
                written = time.monotonic()
                write_flight_record(path)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def write_flight_record(path: Path) -> None:
    """Write the last collectives of this process, and their states."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(_dump())
    partial.replace(path)
