"""Ranks in the process that started them: progress, restarts, and SIGTERM before, between or instead of those."""

import importlib
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainings import Keeping, small
from travelling import CPU, travelled

from jobs.process.messages import Beat, RankFailure
from jobs.process.reporter import ProcessReporter
from jobs.schema.point import RanksEnded
from jobs.train import Case, Spec, measure
from jobs.training import launch
from jobs.training.checkpoints.folder import CheckpointFolder, Manifest
from jobs.training.errors import RankDied, RankFailed, Stopped, Suspended
from jobs.training.launch import RankWatch, run_ranks


def _case(text: Path, **changes: Any) -> Case:
    data = small(text, ranks=2, **{"checkpoints": {"every": 4}, **changes})
    return travelled(Spec.model_validate(data).points(CPU)[0])


class _Ends:
    """A launcher whose ranks never end well: each start gets the next of `acts`, a message and an end."""

    name = "ends"

    def __init__(self, *acts: Callable[[Callable[[Any], None], threading.Event], RanksEnded]) -> None:
        self._acts = list(acts)
        self.stops: list[threading.Event] = []

    def run(self, ranks: int, device: str, main: Any, note: Any, tell: Any, stop: threading.Event) -> list[Any]:
        self.stops.append(stop)
        raise self._acts.pop(0)(note, stop)


def _die(note: Callable[[Any], None], _stop: threading.Event) -> RanksEnded:
    for rank in (0, 1):
        note(Beat("train", 3, 8, rank, 1))
    return RanksEnded({1: "was killed by SIGKILL"}, {})


def _die_when_asked(note: Callable[[Any], None], stop: threading.Event) -> RanksEnded:
    stop.set()
    _die(note, stop)
    return RanksEnded({1: "did not end in time", 0: "did not end in time"}, {})


def _raise_when_asked(note: Callable[[Any], None], stop: threading.Event) -> RanksEnded:
    stop.set()
    _die(note, stop)
    note(RankFailure(1, "RuntimeError", "connection closed"))
    return RanksEnded({}, {})


def _never_begin(_note: Callable[[Any], None], stop: threading.Event) -> RanksEnded:
    stop.set()
    return RanksEnded({0: "was killed by SIGTERM"}, {})


def _save(folder: Path, *, step: int, key: str = "k") -> None:
    known: dict[str, Any] = {"number": 1, "first": 1, "steps": 8, "ranks": 2, "begun": (0,), "foreign": 0, "text": ""}
    manifest = Manifest(step=step, key=key, files={"data": 1}, **known)
    (folder / manifest.name).mkdir(parents=True)
    CheckpointFolder(f"file://{folder}").complete_with(manifest)


def test_a_restart_says_where_it_goes_on_and_begins_its_progress_anew(text: Path, tmp_path: Path) -> None:
    def save_and_die(note: Callable[[Any], None], stop: threading.Event) -> RanksEnded:
        _save(tmp_path, step=4)
        return _die(note, stop)

    launcher = _Ends(_die, save_and_die, _die)
    told = Keeping(tmp_path, launcher=launcher)
    stop = threading.Event()
    with pytest.raises(RankDied):
        run_ranks(_case(text, restarts=2), told, stop)
    assert told.warnings == [
        "rank 1 of 2 was killed by SIGKILL; restart 1 of 2 of all ranks from the beginning",
        "rank 1 of 2 was killed by SIGKILL; restart 2 of 2 of all ranks from the last checkpoint",
    ]
    assert told.phases == ["train", "start", "train", "start", "train"]
    assert launcher.stops == [stop] * 3, "one event for all starts"


@pytest.mark.parametrize("saved", [4, None])
@pytest.mark.parametrize(
    ("act", "end"),
    [
        (_die_when_asked, "; rank 1 of 2 did not end in time"),
        (_raise_when_asked, "; rank 1 of 2: RuntimeError: connection closed"),
        (_never_begin, " before its ranks had begun"),
    ],
)
def test_ranks_that_were_asked_to_end_are_not_started_again(
    text: Path, tmp_path: Path, act: Any, end: str, saved: int | None
) -> None:
    if saved is not None:
        _save(tmp_path, step=saved)
        end += "; go on from the checkpoint of step 4: nsa submit SPEC --resume RUN"
    elif act is _never_begin:
        end += ": nsa submit SPEC --resume RUN"
    else:
        end += "; it has no checkpoint to go on from"
    with pytest.raises(Stopped) as caught:
        run_ranks(_case(text, restarts=3), Keeping(tmp_path, launcher=_Ends(act)), threading.Event())
    assert str(caught.value) == f"SIGTERM ended the training{end}"
    assert isinstance(caught.value, Suspended) == ("--resume" in end)


def test_ranks_for_which_memory_ran_out_are_not_started_again(text: Path, tmp_path: Path) -> None:
    launcher = _Ends(lambda *_: RanksEnded({1: "was killed by SIGKILL"}, {}, [1], {1: "GPU 5 of node3"}))
    with pytest.raises(RankFailed) as caught:
        run_ranks(_case(text, restarts=3), Keeping(tmp_path, launcher=launcher), threading.Event())
    assert isinstance(caught.value.__cause__, MemoryError)
    assert str(caught.value) == "rank 1 of 2 (GPU 5 of node3) was killed by SIGKILL"
    assert len(launcher.stops) == 1


def test_sigterm_ends_a_training_of_which_a_rank_cannot_end(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started_ranks: Callable[[], list[psutil.Process]]
) -> None:
    """One rank is stopped, so that neither ends its step."""
    monkeypatch.setattr(launch, "_STOP_S", 1)
    acted: list[psutil.Process] = []

    class Acting(Keeping):
        def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
            if phase == "train" and done >= 12 and not acted:
                acted.extend(started_ranks())
                acted[1].suspend()
                os.kill(os.getpid(), signal.SIGTERM)

    acting = Acting(tmp_path)
    with pytest.raises(Suspended) as caught:
        measure(_case(text, steps=100_000, checkpoints={"every": 5}, restarts=1), acting)
    found = re.fullmatch(
        r"SIGTERM ended the training; rank [01] of 2 did not end in time; go on from the checkpoint of step (\d+): "
        r"nsa submit SPEC --resume RUN",
        str(caught.value),
    )
    assert found is not None, str(caught.value)
    assert int(found[1]) == CheckpointFolder(f"file://{tmp_path}").complete()[0].step
    assert not any("restart" in warning for warning in acting.warnings)
    assert not started_ranks()


RANKS = """
import os, time
from jobs.process.messages import RankFailure, RankProcess

def main(rank):
    rank.post(RankProcess(rank.number, os.getpid(), "joined"))
    if rank.number == 1:
        time.sleep(1)
        rank.post(RankFailure.of(1, RuntimeError("on purpose")))
        raise RuntimeError("on purpose")
    rank.stop.wait(60)  # asked by the launcher's SIGTERM
    time.sleep(60)
"""


def test_a_rank_that_raised_is_named_and_not_the_one_that_was_killed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the others wait for it on a GPU, and SIGTERM does not reach them."""
    monkeypatch.setattr(launch, "_GRACE_S", 1.0)
    (tmp_path / "one_raises.py").write_text(RANKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    main = importlib.import_module("one_raises").main
    watch = RankWatch(2, Keeping(tmp_path))
    with pytest.raises(RanksEnded) as ended:
        launch.ElasticLauncher().run(2, "cpu", main, watch.note, lambda _: None, threading.Event())
    found = watch.failure(ended.value)
    assert type(found) is RankFailed, "a rank that died would be started again"
    assert str(found).startswith("rank 1 of 2: RuntimeError: on purpose")


# Messages of ranks in the process that started them


def test_progress_is_that_of_the_slowest_rank() -> None:
    """A rank that does not get further is not hidden by the beats of the others."""
    seen: list[tuple[str, int]] = []
    watch = RankWatch(2, lambda phase, done=0, total=0: seen.append((phase, done)))
    fast, slow = (ProcessReporter(watch.note, rank=rank) for rank in (0, 1))
    for step in range(20):
        fast(f"phase {step}", step)
    slow("phase 0", 0)
    slow("phase 1", 1)
    for step in range(20, 30):
        fast(f"phase {step}", step)
    assert seen == [("phase 0", 0), ("phase 1", 1)]
