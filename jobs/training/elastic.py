"""Ranks on this host, started by PyTorch's elastic launcher from the process of a point."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from jobs.process.rank_messages import Message, RankEnded, RankFailure, RankStarted, RankStarting
from jobs.process.rank_pipe import PipeReader
from jobs.schema.launcher import Rank, RanksEnded
from jobs.schema.point import FAILURE_FILES
from jobs.training import rank

T = TypeVar("T")

_POLL_S = 0.1
_GRACE_S = 5.0  # for the other ranks to end by themselves once one has failed
_STOP_S = 60  # for ranks to end once asked to
_TAIL = 40  # lines of a failed rank's stderr that its failure shows
_TAIL_BYTES = 1 << 16  # that they are looked for in
_OOM_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


class ElasticLauncher:
    """A jobs.schema.launcher.Launcher: ranks are children of this process, on its GPUs or its CPU cores."""

    name = "elastic"

    def run(
        self,
        ranks: int,
        device: str,
        main: Callable[[Rank], T],
        note: Callable[[Any], None],
        tell: Callable[[str], None],
        stop: threading.Event,
    ) -> list[T]:
        """As jobs.schema.launcher.Launcher. Ranks that do not end within a minute of `stop` are killed."""
        files = Path(tempfile.gettempdir()) / FAILURE_FILES
        shutil.rmtree(files, ignore_errors=True)  # of an earlier point of this process
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
            watch = _Watch(PipeReader(Path(folder) / "pipe"), note, stop)
            return _run(ranks, device, main, watch, Path(folder), files)


def _run(ranks: int, device: str, main: Callable[[Rank], T], watch: _Watch, folder: Path, files: Path) -> list[T]:
    """As Launcher.run, with the pipe and the logs in `folder`, and what explains a failure in `files`."""
    kills = _oom_kills()
    watch.start()
    codes: dict[int, int] = {}
    try:
        with _launcher_confined():
            launch = elastic_launch(_launch_config(ranks, folder), rank.elastic_main)
            results = launch(main, folder / "pipe", files, device, _fraction(device))
        return [results[number] for number in sorted(results)]
    except ChildFailedError as err:
        codes = {number: failure.exitcode for number, failure in err.failures.items()}
    finally:
        watch.close()
    codes = {number: code for number, code in codes.items() if number not in watch.killed}
    raise _ended(codes, watch.gone, watch.late, folder, killed_by_kernel=_oom_kills() > kills)


def _ended(
    codes: Mapping[int, int], gone: Collection[int], late: Collection[int], folder: Path, *, killed_by_kernel: bool
) -> RanksEnded:
    """The ends of the ranks.

    Args:
        codes: exit codes that the launcher noted, by rank (minus the signal's number), without those killed from here.
        gone: ranks whose process was seen to be gone.
        late: ranks that were killed because they did not end when asked to.
        folder: the ranks' folder, with their logs.
        killed_by_kernel: whether the kernel killed a process for memory meanwhile.
    """
    died = {number: _exit(codes.get(number)) for number in (*codes, *gone)}
    died |= dict.fromkeys(late, "did not end in time")
    tails = {int(path.parent.name): _tail(path) for path in (folder / "logs").glob("**/stderr.log")}
    killed = [number for number in died if codes.get(number) == -signal.SIGKILL and number not in late]
    return RanksEnded(died, tails, killed if killed_by_kernel else ())


def _launch_config(ranks: int, folder: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_POLL_S,
        start_method="spawn",  # CUDA cannot be used in a forked process; and spawned ones stay in the point's group
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), tee=Std.ALL),
        log_line_prefix_template="[rank ${rank}] ",
        signals_to_handle="",  # its own handler would replace the point's, and raise wherever it is
        **_patience(),
    )


def _patience() -> dict[str, Any]:
    """The launcher's time limit for ranks to end once one has, where it takes one: PyTorch 2.11 always gives 30 s."""
    known = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
    return {"shutdown_timeout": _STOP_S} if known else {}


@contextlib.contextmanager
def _launcher_confined() -> Iterator[None]:
    """Undo what the launcher changes in this process, a variable; and keep its log to errors."""
    log = logging.getLogger("torch.distributed.elastic")
    level = log.level
    log.setLevel(logging.CRITICAL)  # failures are told by the exception
    try:
        yield
    finally:
        log.setLevel(level)
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


def _fraction(device: str) -> float | None:
    """Share of a GPU's memory that this process may use, for its ranks; None without a limit."""
    if device != "cuda" or not torch.cuda.is_initialized():
        return None
    fraction = torch.cuda.get_per_process_memory_fraction()
    return fraction if fraction < 1 else None


class _Watch(threading.Thread):
    """Reads the ranks' messages and passes them on; ends all once one failed or died, or `stop` is set.

    Attributes:
        gone: ranks whose process ended before they had done their work, in the order noticed.
        late: ranks that were killed because they did not end when asked to.
        killed: ranks that were killed, these and those that went on after another had failed.
    """

    def __init__(self, reader: PipeReader, note: Callable[[Any], None], stop: threading.Event) -> None:
        super().__init__(name="ranks", daemon=True)
        self.gone: list[int] = []
        self.late: list[int] = []
        self.killed: set[int] = set()
        self._reader = reader
        self._pass_on = note
        self._stop_asked = stop
        self._asked: set[int] = set()  # ranks that got SIGTERM
        self._asked_at: float | None = None
        self._pids: dict[int, int] = {}
        self._joined: set[int] = set()
        self._ended: set[int] = set()  # ranks that have done their work
        self._failed_at: float | None = None
        self._closing = threading.Event()

    def run(self) -> None:
        while not self._closing.is_set():
            for message in self._reader.messages(_POLL_S):
                self._note(message)
            self._look_for_the_dead()
            if self._stop_asked.is_set():
                self._ask_to_end()
            if self._failed_at is not None and time.monotonic() - self._failed_at > _GRACE_S:
                self._kill()

    def close(self) -> None:
        """End the thread, read the messages that are left, and close the pipe."""
        self._closing.set()
        if self.is_alive():
            self.join()
        while messages := self._reader.messages(0):
            for message in messages:
                self._note(message)
        self._reader.close()

    def _note(self, message: Message) -> None:
        match message:
            case RankStarting(rank=number, pid=pid):
                self._pids[number] = pid
            case RankStarted(rank=number):
                self._joined.add(number)
            case RankEnded(rank=number):
                self._ended.add(number)
            case RankFailure():
                self._failed_at = self._failed_at or time.monotonic()
        self._pass_on(message)

    def _look_for_the_dead(self) -> None:
        for number in self._joined - self._ended - self.killed:
            if number not in self.gone and not _runs(self._pids[number]):
                self.gone.append(number)
                self._failed_at = self._failed_at or time.monotonic()

    def _ask_to_end(self) -> None:
        """Send SIGTERM to each rank as soon as it is known, once; kill those that take too long."""
        self._asked_at = self._asked_at or time.monotonic()
        for number in self._pids.keys() - self._asked:
            self._asked.add(number)
            _send(self._pids[number], signal.SIGTERM)
        if time.monotonic() - self._asked_at > _STOP_S:
            self.late = self.late or [number for number, pid in sorted(self._pids.items()) if _runs(pid)]
            self._kill()

    def _kill(self) -> None:
        for number, pid in self._pids.items():
            if _runs(pid):
                self.killed.add(number)
                _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to this child, if it still runs."""
    if _runs(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Whether this child runs; does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # reaped by the launcher
        return False


def _exit(code: int | None) -> str:
    if code is None:
        return "ended without a word"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _tail(log: Path) -> str:
    """The last lines of a log, which may have gigabytes."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL:])


def _oom_kills() -> int:
    """A number that rises when the kernel kills a process for memory."""
    count = 0
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            lines = (line.split() for line in path.read_text().splitlines())
            count += sum(int(line[1]) for line in lines if line[:1] == ["oom_kill"])
    return count
