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
from jobs.schema.launcher import Launcher, RanksEnded
from jobs.schema.point import STARTING, WAITING, Beat, Surroundings, reporter
from jobs.training import rank
from jobs.training.case import TextCase
from jobs.training.checkpoints.folder import CheckpointError, CheckpointFolder
from jobs.training.data.base import DataError
from jobs.training.elastic import ElasticLauncher
from jobs.training.errors import Diverged, Ineffective, MemoryLimit, RankDied, RankFailed, Stopped, Suspended
from jobs.training.live import RANK_COMPUTE_TIME
from jobs.training.metrics import RANK_IMBALANCE
from jobs.training.report import RankReport

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
    report = reporter(beat)
    launcher = report.surroundings.launcher or ElasticLauncher()
    restarts = 0
    while True:
        try:
            return [_with(each, restarts=restarts) for each in _run_once(case, beat, launcher, stop)]
        except RankDied as err:
            if restarts == case.restarts or isinstance(err.__cause__, MemoryError):  # it would run out again
                raise
            restarts += 1
            first, *_ = str(err).splitlines()
            where = "the beginning" if _saved_step(report.surroundings) is None else "the last checkpoint"
            report.warn(f"{first}; restart {restarts} of {case.restarts} of all ranks from {where}")
            report(STARTING)  # in place of the dead ranks' progress


def _run_once(case: TextCase, beat: Beat, launcher: Launcher, stop: threading.Event) -> list[RankReport]:
    ranks = case.layout.ranks
    report, watch = reporter(beat), RankWatch(ranks, beat)
    main = partial(rank.train, case, replace(report.surroundings, launcher=None))

    def waiting(reason: str) -> None:
        report(f"{WAITING}{reason}", 0, ranks)

    try:
        if stop.is_set():
            raise RanksEnded({}, {})
        if case.soak is not None and (folder := report.surroundings.checkpoints) is not None:
            CheckpointFolder(folder).note_start(report.surroundings.key)
        reports = launcher.run(ranks, case.device, main, watch.note, waiting, stop)
        hosts = [report.environment["host"] for report in reports]
        return [_with(report, launcher=launcher.name, hosts=hosts) for report in reports]
    except RanksEnded as err:
        ended = err
    failure = watch.failure(ended)  # raised out here, with its own cause
    of_memory = isinstance(failure.__cause__, MemoryError)
    if stop.is_set() and isinstance(failure, RankFailed) and not of_memory:
        raise watch.interruption(ended, failure)
    raise failure


def _saved_step(there: Surroundings) -> int | None:
    """Step of the checkpoint that the training goes on from; None if none can be found."""
    if there.checkpoints is not None:
        with contextlib.suppress(CheckpointError):
            return CheckpointFolder(there.checkpoints).step_to_go_on_from(there.key)
    return None


def _with(report: RankReport, **found: Any) -> RankReport:
    training = {**report.environment["training"], **found}
    return replace(report, environment={**report.environment, "training": training})


class RankWatch:
    """Takes the ranks' messages: passes on samples, imbalance and the slowest one's progress, remembers failures."""

    def __init__(self, ranks: int, beat: Beat) -> None:
        self._ranks = ranks
        self._report = reporter(beat)
        self._compute_ms: dict[int, deque[float]] = {}  # latest own compute times by rank
        self._steps: dict[int, int] = {}  # that these are of
        self._pids: dict[int, int] = {}
        self._beats: dict[int, RankBeat] = {}
        self._begun = False
        self._compared = 0  # the step of the last reported imbalance
        self._sent = 0  # number of the last forwarded beat
        self._failures: dict[int, RankFailure] = {}  # in the order of arrival

    def note(self, message: Any) -> None:
        """Handle a message of a rank (jobs.process.messages)."""
        self._begun = self._begun or isinstance(message, RankBeat)
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
            case RankBeat(rank=number):  # forwarded once every rank has made progress: a stalled one is not hidden
                self._beats[number] = message
                slowest = min(self._beats.values(), key=lambda beat: beat.number)
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
        if silent := self._silent(ended):
            number = silent[0]
            text = f"rank {number} of {self._ranks} {ended.died[number]}{_tail(ended, number)}"
            died = RankDied(text)
            died.__cause__ = MemoryError("memory ran out") if number in ended.out_of_memory else None
            return died
        if not self._failures:
            return RankFailed(f"the {self._ranks} ranks were stopped before the first of them had begun")
        first = next(iter(self._failures.values()))
        if first.type in _ENDS:
            return _ENDS[first.type](first.text)
        text = f"rank {first.rank} of {self._ranks}: {first.type}: {first.text}{_tail(ended, first.rank)}"
        failed = RankFailed(text)
        failed.__cause__ = MemoryError(first.text) if first.type in ("OutOfMemoryError", "MemoryError") else None
        return failed

    def interruption(self, ended: RanksEnded, failure: RankFailed) -> Stopped:
        """The exception in place of `failure` where the ranks had been asked to end."""
        text = "SIGTERM ended the training"
        if not self._begun:
            text += " before its ranks had begun"
        elif silent := self._silent(ended):
            numbers: dict[str, list[str]] = {}  # of ranks, by their end
            for number in sorted(silent):
                numbers.setdefault(ended.died[number], []).append(str(number))
            for end, those in numbers.items():
                text += f"; rank{'s' if len(those) > 1 else ''} {', '.join(those)} of {self._ranks} {end}"
        else:
            text += f"; {str(failure).splitlines()[0]}"
        if (step := _saved_step(self._report.surroundings)) is not None:
            return Suspended.at(step, text)
        if not self._begun:
            return Suspended(f"{text}: nsa submit SPEC --resume RUN")
        return Stopped(f"{text}; it has no checkpoint to go on from")

    def _silent(self, ended: RanksEnded) -> list[int]:
        return [number for number in ended.died if number not in self._failures]


def _tail(ended: RanksEnded, number: int) -> str:
    """The end of a rank's stderr, as further lines of a message."""
    lines = ended.tails.get(number, "")
    return f"\nthe end of its stderr:\n{lines}" if lines else ""
