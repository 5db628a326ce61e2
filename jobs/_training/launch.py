"""Training on several ranks, from the process of their point: progress, failures, restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jobs._data.base import DataError
from jobs._training import rank
from jobs._training.checkpoint_folder import CheckpointError
from jobs._training.elastic import ElasticLauncher
from jobs._training.errors import Diverged, Ineffective, MemoryLimit, RankDied, RankFailed, Stopped, Suspended
from jobs._training.rank_messages import CHECKPOINT, RankBeat, RankFailure, RankNoted, RankSample, RankWarned
from jobs._training.report import RankReport
from jobs.launcher import Launcher, RanksEnded
from jobs.measure.check import WrongResult
from jobs.point import WAITING, Beat, reporter

_ENDS = (CheckpointError, DataError, Diverged, Ineffective, MemoryLimit, Stopped, Suspended, WrongResult)
_KNOWN = {cls.__name__: cls for cls in _ENDS}


def run_ranks(config: Mapping[str, Any], beat: Beat) -> list[RankReport]:
    """Train with the point's configuration on its ranks; returns their reports, by rank.

    Ranks of which one died are started again together, as often as the configuration says, and go on from the last
    checkpoint; `training.restarts` of the environment is how often. A launcher's own restarts would also repeat a
    training that diverged.

    Args:
        beat: gets the progress of the slowest rank.

    Raises:
        RankFailed: a rank ended; the others were killed. Caused by a MemoryError if memory ran out.
        DataError, WrongResult, Diverged, Stopped, Ineffective, MemoryLimit, CheckpointError: as train_rank, where a
            rank raised it.
    """
    launcher = reporter(beat).surroundings.launcher or ElasticLauncher()
    allowed = config.get("restarts", 0)
    restarts = 0
    while True:
        try:
            return [_with(report, restarts=restarts) for report in _run_once(config, beat, launcher)]
        except RankDied as err:
            if restarts == allowed or isinstance(err.__cause__, MemoryError):  # it would run out again
                raise
            restarts += 1
            first, *_ = str(err).splitlines()
            reporter(beat).warn(f"{first}; restart {restarts} of {allowed} of all ranks from the last checkpoint")


def _run_once(config: Mapping[str, Any], beat: Beat, launcher: Launcher) -> list[RankReport]:
    ranks = config["ranks"]["ranks"]
    watch = RankWatch(ranks, beat)
    main = partial(rank.train, config, reporter(beat).surroundings.without_launcher())
    try:
        reports = launcher.run(ranks, config["device"], main, watch.note, watch.waiting)
        hosts = [report.environment["host"] for report in reports]
        return [_with(report, launcher=launcher.name, hosts=hosts) for report in reports]
    except RanksEnded as ended:
        raise watch.failure(ended) from None


def _with(report: RankReport, **found: Any) -> RankReport:
    """The report, with more about its training."""
    training = {**report.environment["training"], **found}
    return replace(report, environment={**report.environment, "training": training})


class RankWatch:
    """Takes the ranks' messages: passes on samples and the slowest one's progress, and remembers failures."""

    def __init__(self, ranks: int, beat: Beat) -> None:
        self._ranks = ranks
        self._report = reporter(beat)
        self._beats: dict[int, RankBeat] = {}
        self._sent = 0  # number of the last forwarded beat
        self._failures: dict[int, RankFailure] = {}  # in the order of arrival

    def note(self, message: Any) -> None:
        """Take a message of a rank (jobs._training.rank_messages)."""
        match message:
            case RankFailure(rank=number):
                self._failures.setdefault(number, message)
            case RankSample(rank=number, step=step, values=values):
                self._report.sample(step, values, number)
            case RankWarned(text=text):
                self._report.warn(text)
            case RankNoted(name=name, text=text):
                self._report.keep(name, text)
            case RankBeat(phase=phase, done=done, total=total) if phase == CHECKPOINT:
                self._report(phase, done, total)  # whichever rank writes: the others wait for it
            case RankBeat(rank=number):
                self._beats[number] = message
                self._forward()

    def waiting(self, reason: str) -> None:
        """Report that the ranks wait to be started."""
        self._report(f"{WAITING}{reason}", 0, self._ranks)

    def failure(self, ended: RanksEnded) -> Exception:
        """The exception for the first failure: of ranks that died without a word, else of the earliest exception."""
        silent = [number for number in ended.died if number not in self._failures]
        if silent:
            number = silent[0]
            text = f"rank {number} of {self._ranks} {ended.died[number]}{_tail(ended, number)}"
            memory = number in ended.out_of_memory
            return _caused(RankDied(text), MemoryError("memory ran out") if memory else None)
        if not self._failures:
            return RankFailed(f"the {self._ranks} ranks were stopped before the first of them had begun")
        first = next(iter(self._failures.values()))
        if (known := _KNOWN.get(first.type)) is not None:
            return known(first.text)
        memory = first.type in ("OutOfMemoryError", "MemoryError")
        text = f"rank {first.rank} of {self._ranks}: {first.type}: {first.text}{_tail(ended, first.rank)}"
        return _caused(RankFailed(text), MemoryError(first.text) if memory else None)

    def _forward(self) -> None:
        """Report progress once every rank has made it: a stalled rank is not hidden by the others' beats."""
        if len(self._beats) < self._ranks:
            return
        slowest = min(self._beats.values(), key=lambda beat: beat.number)
        if slowest.number > self._sent:
            self._sent = slowest.number
            self._report(slowest.phase, slowest.done, slowest.total)


def _tail(ended: RanksEnded, number: int) -> str:
    """The end of a rank's stderr, as further lines of a message."""
    lines = ended.tails.get(number, "")
    return f"\nthe end of its stderr:\n{lines}" if lines else ""


def _caused(err: Exception, cause: Exception | None) -> Exception:
    err.__cause__ = cause
    return err
