"""Training on several ranks, from the process of their point: progress, failures, restarts."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from jobs.diagnosis.advice import imbalance
from jobs.measure.check import WrongResult
from jobs.process.messages import Beat as RankBeat
from jobs.process.messages import Note, RankFailure, RankProcess, Samples, Warned
from jobs.process.reporter import CHECKPOINT
from jobs.schema.launcher import RanksEnded
from jobs.schema.point import STARTING, WAITING, Beat, Surroundings, reporter
from jobs.training.case import TextCase
from jobs.training.checkpoints.folder import CheckpointError, CheckpointFolder
from jobs.training.data.base import DataError
from jobs.training.elastic import ElasticLauncher
from jobs.training.errors import Diverged, Ineffective, MemoryLimit, RankDied, RankFailed, Stopped, Suspended
from jobs.training.live import RANK_COMPUTE_TIME
from jobs.training.metrics import RANK_IMBALANCE
from jobs.training.rank import RankReport, train

_RECENT = 20  # samples of a rank: ten seconds, or as many steps where those take longer
_ENDS: dict[str, type[Exception]] = {  # exceptions of a rank that are raised here as they are
    cls.__name__: cls
    for cls in (CheckpointError, DataError, Diverged, Ineffective, MemoryLimit, Stopped, Suspended, WrongResult)
}


def run_ranks(case: TextCase, beat: Beat, stop: threading.Event) -> list[RankReport]:
    """Train a case on its ranks; returns their reports, by rank.

    Ranks of which one died are started again together, as often as the case says, and go on from the last
    checkpoint; `training.restarts` of the environment is how often. A launcher's own restarts would also repeat a
    training that diverged.

    Args:
        beat: gets the progress of the slowest rank.
        stop: once set, the ranks are asked to end, and are not started again.

    Raises:
        RankFailed: a rank ended; the others were killed. Caused by a MemoryError if memory ran out.
        Stopped: `stop` was set before the end; Suspended if the training can go on.
        DataError, WrongResult, Diverged, Ineffective, MemoryLimit, CheckpointError: as train_rank, where a rank raised
            it.
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
            return [each.with_training(launcher=launcher.name, hosts=hosts, restarts=restarts) for each in reports]
        of_memory = isinstance(failure.__cause__, MemoryError)  # it would run out again
        if stop.is_set() and isinstance(failure, RankFailed) and not of_memory:
            raise watch.interruption(failure)
        if restarts == case.restarts or of_memory or not isinstance(failure, RankDied):
            raise failure
        restarts += 1
        where = "the beginning" if _saved_step(there) is None else "the last checkpoint"
        first = str(failure).partition("\n")[0]
        report.warn(f"{first}; restart {restarts} of {case.restarts} of all ranks from {where}")
        report(STARTING)  # in place of the dead ranks' progress


def _saved_step(there: Surroundings) -> int | None:
    """Step of the checkpoint that the training goes on from; None if none can be found."""
    if there.checkpoints is not None:
        with contextlib.suppress(CheckpointError):
            return CheckpointFolder(there.checkpoints).step_to_go_on_from(there.key)
    return None


class RankWatch:
    """Takes the ranks' messages: passes on samples, imbalance and the slowest one's progress, remembers failures."""

    def __init__(self, ranks: int, beat: Beat) -> None:
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
            case RankBeat():
                self._pass_on(message)

    def _pass_on(self, beat: RankBeat) -> None:
        """Pass on the slowest rank's beat, once every rank has made progress: a stalled one is not hidden."""
        if beat.phase == CHECKPOINT:  # whichever rank writes: the others wait for it
            self._report(beat.phase, beat.done, beat.total)
            return
        self._beats[beat.rank] = beat
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
        if number is not None:
            of_memory = number in ended.out_of_memory
            failed: RankFailed = RankDied(f"rank {number} of {self._ranks} {ended.died[number]}{_tail(ended, number)}")
        elif not self._failures:
            return RankFailed(f"the {self._ranks} ranks were stopped before the first of them had begun")
        else:
            first = next(iter(self._failures.values()))
            if first.type in _ENDS:
                return _ENDS[first.type](first.text)
            tail, of_memory = _tail(ended, first.rank), first.type in ("OutOfMemoryError", "MemoryError")
            failed = RankFailed(f"rank {first.rank} of {self._ranks}: {first.type}: {first.text}{tail}")
        failed.__cause__ = MemoryError("memory ran out") if of_memory else None
        return failed

    def interruption(self, failure: RankFailed) -> Stopped:
        """The exception in place of `failure` where the ranks had been asked to end."""
        begun = bool(self._beats)
        why = f"; {str(failure).splitlines()[0]}" if begun else " before its ranks had begun"
        text = f"SIGTERM ended the training{why}"
        if (step := _saved_step(self._report.surroundings)) is not None:
            return Suspended.at(step, text)
        if not begun:
            return Suspended(f"{text}: nsa submit SPEC --resume RUN")
        return Stopped(f"{text}; it has no checkpoint to go on from")


def _tail(ended: RanksEnded, number: int) -> str:
    """The end of a rank's stderr, as further lines of a message."""
    lines = ended.tails.get(number, "")
    return f"\nthe end of its stderr:\n{lines}" if lines else ""
