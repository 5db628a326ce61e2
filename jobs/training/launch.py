"""Training on several ranks, from the process of their point: started here, or by Ray; progress, failures, restarts."""

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from jobs.diagnosis.advice import imbalance
from jobs.hardware import nvml
from jobs.measure.check import WrongResult
from jobs.process.memory_limit import gpu_share
from jobs.process.messages import Beat as RankBeat
from jobs.process.messages import Inbox, Message, Note, RankFailure, RankProcess, Warned
from jobs.process.post_mortem import child_runs, describe_exit, oom_kills, tail
from jobs.process.reporter import CHECKPOINT
from jobs.schema.point import FAILURE_FILES, STARTING, WAITING, Beat, Rank, RanksEnded, Samples, Surroundings, reporter
from jobs.training.case import TextCase
from jobs.training.checkpoints.folder import CheckpointError, CheckpointFolder
from jobs.training.data.corpus import DataError
from jobs.training.errors import Diverged, Ineffective, MemoryLimit, RankDied, RankFailed, Stopped, Suspended
from jobs.training.live import RANK_COMPUTE_TIME
from jobs.training.metrics import RANK_IMBALANCE
from jobs.training.rank import RankReport, elastic_main, train

T = TypeVar("T")

_POLL_S = 0.1
_GRACE_S = 5.0  # for the other ranks to end by themselves once one has failed
_STOP_S = 60  # for ranks to end once asked to
_TAIL = 40  # lines of a failed rank's stderr that its failure shows
_RECENT = 20  # samples of a rank: ten seconds, or as many steps where those take longer
_ENDS: dict[str, type[Exception]] = {  # exceptions of a rank that are raised here as they are
    cls.__name__: cls
    for cls in (CheckpointError, DataError, Diverged, Ineffective, MemoryLimit, Stopped, Suspended, WrongResult)
}


def run_ranks(case: TextCase, beat: Beat, stop: threading.Event) -> list[RankReport]:
    """Train a case on its ranks; returns their reports, by rank. Once `stop` is set, the ranks are asked to end.

    Ranks of which one died are started again together, as often as the case says, and go on from the last
    checkpoint; `training.restarts` of the environment is how often. A launcher's own restarts would also repeat a
    training that diverged.

    Raises:
        RankFailed: a rank ended; the others were killed. Caused by a MemoryError if memory ran out.
        Stopped: `stop` was set before the end; Suspended if the training can go on.
        Others: as train_rank, where a rank raised them.
    """
    report, ranks, restarts = reporter(beat), case.layout.ranks, 0
    there = report.surroundings
    launcher = there.launcher or ElasticLauncher()
    main = partial(train, case, replace(there, launcher=None))
    while True:
        watch = RankWatch(ranks, beat)
        try:
            if stop.is_set():
                raise RanksEnded({}, {})
            if case.soak is not None and there.checkpoints is not None:
                CheckpointFolder(there.checkpoints).note_start(there.key)
            reports = launcher.run(
                ranks, case.device, main, watch.note, lambda reason: report(f"{WAITING}{reason}", 0, ranks), stop
            )
        except RanksEnded as err:
            failure = watch.failure(err)  # raised out here, with its own cause
        else:
            hosts = [each.environment["host"] for each in reports]
            for each in reports:
                each.environment["training"] |= {"launcher": launcher.name, "hosts": hosts, "restarts": restarts}
            return reports
        of_memory = isinstance(failure.__cause__, MemoryError)  # it would run out again
        if stop.is_set() and isinstance(failure, RankFailed) and not of_memory:
            saved_step = _saved_step(there)
            why = f"; {str(failure).splitlines()[0]}" if watch.begun else " before its ranks had begun"
            if saved_step is not None:
                raise Suspended.at(saved_step, f"SIGTERM ended the training{why}")
            if not watch.begun:
                raise Suspended(f"SIGTERM ended the training{why}: nsa submit SPEC --resume RUN")
            raise Stopped(f"SIGTERM ended the training{why}; it has no checkpoint to go on from")
        if restarts == case.restarts or of_memory or not isinstance(failure, RankDied):
            raise failure
        restarts += 1
        where = "the beginning" if _saved_step(there) is None else "the last checkpoint"
        first = str(failure).partition("\n")[0]
        report.warn(f"{first}; restart {restarts} of {case.restarts} of all ranks from {where}")
        report(STARTING)  # instead of the dead ranks' progress


def _saved_step(there: Surroundings) -> int | None:
    """Step of the checkpoint that the training goes on from; None if none can be found, or it begins anew."""
    with contextlib.suppress(CheckpointError):
        newest = CheckpointFolder(there.checkpoints).complete()[:1] if there.checkpoints is not None else []
        return next((manifest.step for manifest in newest if manifest.goes_on(there.key)), None)
    return None


class RankWatch:
    """Takes the ranks' messages: passes on samples, imbalance and the slowest one's progress, remembers failures."""

    def __init__(self, ranks: int, beat: Beat) -> None:
        self.begun = False  # whether a rank has made progress
        self._ranks = ranks
        self._report = reporter(beat)
        self._compute_ms: dict[int, deque[float]] = {}  # latest own compute times by rank
        self._steps: dict[int, int] = {}  # that these are of
        self._pids: dict[int, int] = {}
        self._beats: dict[int, RankBeat] = {}
        self._compared = 0  # the step of the last reported imbalance
        self._sent = 0  # number of the last forwarded beat
        self._failures: dict[int, RankFailure] = {}  # in the order of arrival

    def note(self, message: Any) -> None:
        """Handle a message of a rank (jobs.process.messages)."""
        match message:
            case RankProcess(rank=number, pid=pid, stage="joined"):
                self._pids[number] = pid
                if len(self._pids) == self._ranks:
                    self._report.ranks([self._pids[rank] for rank in range(self._ranks)])
            case RankFailure(rank=number):
                self._failures.setdefault(number, message)
            case Samples(rank=number, step=step, values=values):
                self._report.sample(step, values, number)
                if (ms := values.get(RANK_COMPUTE_TIME.name)) is not None:
                    self._compare(number, step, ms)
            case Warned(text=text):
                self._report.warn(text)
            case Note(name=name, text=text):
                self._report.keep(name, text)
            case RankBeat(phase=phase, done=done, total=total) if phase == CHECKPOINT:
                self._report(phase, done, total)  # whichever rank writes: the others wait for it
            case RankBeat(rank=number):  # the slowest one's, once every rank has made progress: no stall is hidden
                self.begun = True
                self._beats[number] = message
                slowest = min(self._beats.values(), key=lambda each: each.number)
                if len(self._beats) == self._ranks and slowest.number > self._sent:
                    self._sent = slowest.number
                    self._report(slowest.phase, slowest.done, slowest.total)

    def _compare(self, number: int, step: int, compute_ms: float) -> None:
        """Report the imbalance of the ranks once all have got to another step.

        Of medians, because a rank's first step compiles, and the one after a checkpoint waits: by chance one rank's
        longer.
        """
        self._compute_ms.setdefault(number, deque(maxlen=_RECENT)).append(compute_ms)
        self._steps[number] = step
        slowest = min(self._steps.values())
        if len(self._steps) < self._ranks or slowest <= self._compared:
            return
        self._compared = slowest
        if (share := imbalance({rank: median(times) for rank, times in self._compute_ms.items()})) is not None:
            self._report.sample(slowest, {RANK_IMBALANCE.name: share})

    def failure(self, ended: RanksEnded) -> Exception:
        """The exception for the first failure: of ranks that died without a word, else of the earliest exception."""
        number = next((number for number in ended.died if number not in self._failures), None)
        if number is None and not self._failures:
            return RankFailed(f"the {self._ranks} ranks were stopped before the first of them had begun")
        if number is not None:
            kind, of_memory, text = RankDied, number in ended.out_of_memory, f" {ended.died[number]}"
        else:
            number, first = next(iter(self._failures.items()))
            if first.type in _ENDS:
                return _ENDS[first.type](first.text)
            kind, of_memory = RankFailed, first.type in ("OutOfMemoryError", "MemoryError")
            text = f": {first.type}: {first.text}"
        lines = ended.tails.get(number, "")
        card = f" ({ended.cards[number]})" if number in ended.cards else ""
        tail = f"\nthe end of its stderr:\n{lines}" if lines else ""
        failed = kind(f"rank {number} of {self._ranks}{card}{text}{tail}")
        failed.__cause__ = MemoryError("memory ran out") if of_memory else None
        return failed


class ElasticLauncher:
    """A jobs.schema.point.Launcher: ranks are children of this process, on its GPUs or its CPU cores."""

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
        """As jobs.schema.point.Launcher. Ranks that do not end within a minute of `stop` are killed."""
        files = Path(tempfile.gettempdir()) / FAILURE_FILES
        shutil.rmtree(files, ignore_errors=True)  # of an earlier point of this process
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the exception reports failures
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
            folder, kills = Path(name), oom_kills()
            watch = _Processes(folder / "pipe", note, stop)
            watch.start()
            try:
                config = LaunchConfig(
                    min_nodes=1,
                    max_nodes=1,
                    nproc_per_node=ranks,
                    run_id=uuid.uuid4().hex,
                    rdzv_backend="c10d",
                    rdzv_endpoint="localhost:0",
                    local_addr="localhost",
                    max_restarts=0,
                    monitor_interval=_POLL_S,
                    start_method="spawn",  # CUDA cannot be used in a forked process; spawned ones stay in the group
                    logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), tee=Std.ALL),
                    log_line_prefix_template="[rank ${rank}] ",
                    signals_to_handle="",  # its own handler would replace the point's, and raise wherever it is
                )
                launch = elastic_launch(config, elastic_main)
                results = launch(main, folder / "pipe", files, device, gpu_share(device))
                return [results[number] for number in sorted(results)]
            except ChildFailedError as err:
                codes = {number: failure.exitcode for number, failure in err.failures.items()}
            finally:
                watch.close()
                os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # the launcher has set it
            codes = {number: code for number, code in codes.items() if number not in watch.killed}
            died = {
                n: f"was {describe_exit(code)}" if code < 0 else f"exited with code {code}" for n, code in codes.items()
            }
            died |= dict.fromkeys(watch.late, "did not end in time")
            tails = {int(log.parent.name): tail(log, _TAIL) for log in (folder / "logs").glob("**/stderr.log")}
            of_memory = [n for n in died if codes.get(n) == -signal.SIGKILL and n not in watch.late]
            cards = {number: f"GPU {gpu}" for number, gpu in enumerate(nvml.visible_gpus())} if device == "cuda" else {}
            raise RanksEnded(died, tails, of_memory if oom_kills() > kills else (), cards)


class _Processes(threading.Thread):
    """The ranks' processes: passes on their messages; ends all once one failed, or `stop` is set.

    The launcher ends the others if one dies; one that has raised may also hang in CUDA's clean-up.
    """

    def __init__(self, pipe: Path, note: Callable[[Any], None], stop: threading.Event) -> None:
        super().__init__(name="ranks", daemon=True)
        self.late: list[int] = []  # ranks that were killed because they did not end when asked to
        self.killed: set[int] = set()  # these, and those that went on after another had failed
        os.mkfifo(pipe)
        self._inbox = Inbox(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # its own writer: it never reads end of file
        self._note, self._stop_asked = note, stop
        self._pids: dict[int, int] = {}
        self._asked: set[int] = set()  # ranks that got SIGTERM
        self._asked_at = self._failed_at = float("inf")
        self._closing = threading.Event()

    def run(self) -> None:
        while not self._closing.is_set():
            self._read(_POLL_S)
            now, running = time.monotonic(), [number for number, pid in sorted(self._pids.items()) if child_runs(pid)]
            ending: list[int] = []
            if self._stop_asked.is_set():
                self._asked_at = min(self._asked_at, now)
                ending = [number for number in running if number not in self._asked]  # once its process is known
                self._asked.update(ending)
            if now - self._asked_at > _STOP_S:
                self.late = self.late or running
            kill = now - self._asked_at > _STOP_S or now - self._failed_at > _GRACE_S
            if kill:
                self.killed.update(running)
            for number in running if kill else ending:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[number], signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        """End the thread, read the remaining messages, and close the pipe."""
        self._closing.set()
        self.join()
        while self._read(0):
            pass
        os.close(self._inbox.fd)

    def _read(self, timeout: float) -> list[Message]:
        messages = self._inbox.receive(timeout)
        for message in messages:
            match message:
                case RankProcess(rank=number, pid=pid):
                    self._pids[number] = pid
                case RankFailure():
                    self._failed_at = min(self._failed_at, time.monotonic())
            self._note(message)
        return messages
