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
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from jobs.process.memory_limit import gpu_share
from jobs.process.messages import Inbox, Message, RankFailure, RankProcess
from jobs.process.post_mortem import describe_exit, oom_kills, tail
from jobs.schema.launcher import Rank, RanksEnded
from jobs.schema.point import FAILURE_FILES
from jobs.training import rank

T = TypeVar("T")

_POLL_S = 0.1
_GRACE_S = 5.0  # for the other ranks to end by themselves once one has failed
_STOP_S = 60  # for ranks to end once asked to
_TAIL = 40  # lines of a failed rank's stderr that its failure shows


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
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the exception reports failures
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
            folder, kills = Path(name), oom_kills()
            watch = _RankWatch(folder / "pipe", note, stop)
            watch.start()
            try:
                launch = elastic_launch(_launch_config(ranks, folder), rank.elastic_main)
                results = launch(main, folder / "pipe", files, device, gpu_share(device))
                return [results[number] for number in sorted(results)]
            except ChildFailedError as err:
                codes = {number: failure.exitcode for number, failure in err.failures.items()}
            finally:
                watch.close()
                os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # the launcher has set it
            codes = {number: code for number, code in codes.items() if number not in watch.killed}
            died = {number: _end(codes.get(number)) for number in (*codes, *watch.gone)}
            died |= dict.fromkeys(watch.late, "did not end in time")
            tails = {int(log.parent.name): tail(log, _TAIL) for log in (folder / "logs").glob("**/stderr.log")}
            of_memory = [n for n in died if codes.get(n) == -signal.SIGKILL and n not in watch.late]
            raise RanksEnded(died, tails, of_memory if oom_kills() > kills else ())


def _launch_config(ranks: int, folder: Path) -> LaunchConfig:
    patience: dict[str, Any] = {}
    if any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):  # PyTorch 2.11 always gives 30 s
        patience["shutdown_timeout"] = _STOP_S  # for ranks to end once one has
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
        **patience,
    )


class _RankWatch(threading.Thread):
    """Reads the ranks' messages and passes them on; ends all once one failed or died, or `stop` is set.

    Attributes:
        gone: ranks whose process ended before they had done their work, in the order noticed.
        late: ranks that were killed because they did not end when asked to.
        killed: ranks that were killed, these and those that went on after another had failed.
    """

    def __init__(self, pipe: Path, note: Callable[[Any], None], stop: threading.Event) -> None:
        super().__init__(name="ranks", daemon=True)
        self.gone: list[int] = []
        self.late: list[int] = []
        self.killed: set[int] = set()
        os.mkfifo(pipe)
        self._inbox = Inbox(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # its own writer: it never reads end of file
        self._pass_on = note
        self._stop_asked = stop
        self._pids: dict[int, int] = {}
        self._working: set[int] = set()  # ranks that have joined the others and are not done
        self._asked: set[int] = set()  # ranks that got SIGTERM
        self._asked_at = self._failed_at = float("inf")
        self._closing = threading.Event()

    def run(self) -> None:
        while not self._closing.is_set():
            self._read(_POLL_S)
            now = time.monotonic()
            gone = [n for n in self._working - self.killed if n not in self.gone and not _runs(self._pids[n])]
            if gone:
                self.gone += gone
                self._failed_at = min(self._failed_at, now)
            if self._stop_asked.is_set():
                self._asked_at = min(self._asked_at, now)
                for number in self._pids.keys() - self._asked:  # as soon as its process is known, once
                    self._asked.add(number)
                    _send(self._pids[number], signal.SIGTERM)
            if now - self._asked_at > _STOP_S:
                self.late = self.late or [number for number, pid in sorted(self._pids.items()) if _runs(pid)]
            if now - self._asked_at > _STOP_S or now - self._failed_at > _GRACE_S:
                self.killed.update(number for number, pid in self._pids.items() if _send(pid, signal.SIGKILL))

    def close(self) -> None:
        """End the thread, read the remaining messages, and close the pipe."""
        self._closing.set()
        self.join()
        while self._read(0):
            pass
        self._inbox.close()

    def _read(self, timeout: float) -> list[Message]:
        messages = self._inbox.receive(timeout)
        for message in messages:
            match message:
                case RankProcess(rank=number, pid=pid, stage=stage):
                    self._pids[number] = pid
                    (self._working.add if stage == "joined" else self._working.discard)(number)
                case RankFailure():
                    self._failed_at = min(self._failed_at, time.monotonic())
            self._pass_on(message)
        return messages


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal to this child, if it still runs. Returns whether it did."""
    if running := _runs(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return running


def _runs(pid: int) -> bool:
    """Whether this child runs; does not reap it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # reaped by the launcher
        return False


def _end(code: int | None) -> str:
    if code is None:
        return "ended without a word"
    return f"was {describe_exit(code)}" if code < 0 else f"exited with code {code}"
