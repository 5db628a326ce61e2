"""`nsa diagnose`: a live run from outside, runs that are not live, and this host."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from made_up_runs import HALF, RUN, complete, complete_file, database, half_finished
from nsa_command import Nsa

from jobs.diagnosis.rank_state import Memory, RankState, identity
from orchestrator.cli import diagnose as diagnosis
from orchestrator.store import Store, queries
from orchestrator.store import records as rec

__all__ = ["complete", "complete_file", "database", "half_finished"]  # fixtures

POINT = f"{HALF}/2"
BUSY = "import time\ndef train():\n    while True:\n        time.sleep(0.001)\nprint('on', flush=True)\ntrain()\n"
UNSEEN = "## Environment variables\n\nunknown: no process of the training was read on this host\n\n"


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, run_nsa: Nsa) -> Nsa:
    """Runs `nsa diagnose`; this process keeps its priority."""
    monkeypatch.setattr(diagnosis, "give_way", lambda: None)
    return partial(run_nsa, "diagnose")


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[int]:
    """The number of a process that stands for a rank."""
    (tmp_path / "busy.py").write_text(BUSY)
    env = {**os.environ, "NCCL_P2P_DISABLE": "1", "NCCL_API_KEY": "s3cr3t"}
    with subprocess.Popen([sys.executable, tmp_path / "busy.py"], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def _state(rank: int, pid: int, process: str, host: str) -> RankState:
    memory = {"boot": Memory(101.0), "loader": Memory(202.0), "step_1": Memory(303.0)}
    place = {"host": host, "pid": pid, "process": process, "device": "cpu", "gpu": "", "cores": "0-7", "threads": 1}
    known = {"route": {"slc": "chunked"}, "versions": {"torch": "2.13.0"}, "memory": memory}
    return RankState(rank=rank, ranks=2, step=1, **place, **known)


def _store(url: str, states: list[RankState], names: list[str] | None = None) -> None:
    """Give the running point the files of its ranks, and series."""
    with Store.open(url) as store:
        for place, state in enumerate(states):
            name = names[place] if names else f"rank{state.rank}.json"
            file = rec.ArtifactData(
                name=name, path=f"2/{name}", size=9, sha256="0" * 64, content=json.dumps(asdict(state))
            )
            store.apply_many([rec.ArtifactRecord(run_id=HALF, point_id=POINT, attempt=1, artifact=file)])
            own = {"training_memory": ("MiB", 404.0 + state.rank), "rank_compute_time": ("ms", 10.0 + 10 * state.rank)}
            for series, (unit, value) in own.items():
                sample = rec.SeriesRecord(
                    run_id=HALF, point_id=POINT, attempt=1, rank=state.rank, name=series, unit=unit, steps=(5,),
                    times=(datetime.now(UTC).timestamp(),), values=(value,),
                )  # fmt: skip
                store.apply_many([sample])


def test_a_live_run_is_seen_from_outside(half_finished: str, diagnose: Nsa, busy: int) -> None:
    here = _state(0, busy, identity(busy) or "", "here")
    elsewhere = _state(1, busy, "another boot 1 2", "far-away")  # the same number on another host
    _store(half_finished, [here, elsewhere])
    code, out, _ = diagnose("--attach", HALF[:13], "--seconds", "0.5")
    assert code == 0
    assert "timing 3/10" in out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith(("| 0 | 101", "| 1 | 101"))]
    assert rows[0][1:4] == ["101", "202", "303"]
    assert float(rows[0][4].rstrip(" |")) < 100  # read from the process, not from the series
    assert rows[1][4].rstrip(" |") == "405"
    assert "rank 1 on far-away" in out
    assert re.search(r"Rank 0(?: is in train \(.*busy.py:|'s stack is not readable: )", out), out
    assert "slc: chunked" in out
    assert "NCCL_P2P_DISABLE=1: gradients go" in out
    assert "s3cr3t" not in out
    assert "33.3 % longer than the mean" in out
    assert psutil.pid_exists(busy)


def test_a_point_before_its_first_step_and_one_that_is_silent_are_told(half_finished: str, diagnose: Nsa) -> None:
    with Store.open(half_finished) as store:
        store.beat(rec.Progress(HALF, POINT, datetime.now(UTC) - timedelta(minutes=5), "corpus", 0, 0))
    code, out, _ = diagnose("--attach", "last")
    assert code == 0
    assert "has not done its first step" in out
    assert out.endswith(UNSEEN)
    assert re.search(r"no progress for 3\d\d s, last in phase 'corpus'; see `nsa logs", out)


HOSTILE = "\x1b]0;owned\x07\x1b[31m![x](http://evil.example/x.png) <img src=x> [y](http://evil.example) ` a|b"


def test_text_of_a_rank_neither_acts_on_a_terminal_nor_is_markdown(half_finished: str, diagnose: Nsa) -> None:
    state = replace(_state(0, 1, "gone", HOSTILE), gpu="", route={"slc": HOSTILE}, versions={"torch": HOSTILE})
    _store(half_finished, [state])
    code, out, _ = diagnose("--attach", HALF)
    assert code == 0
    assert "\x1b" not in out
    assert "x1b]0;owned" in out
    assert out.count("\\<img src=x>") == out.count("<img") >= 4  # row, note, versions and the warning about them
    assert not re.search(r"(?<!\\)\]\(http", out)
    row = next(line for line in out.splitlines() if line.startswith("| 0 |") and "owned" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 9


def test_what_is_not_live_is_refused_in_a_line(complete: str, diagnose: Nsa) -> None:
    with Store.open(complete, readonly=True) as store:
        (reported, *_) = queries.runs(store, origin="reported")["run_id"]
    for args, words in (
        (["--attach", RUN], "is done, not running; `nsa show"),
        (["--attach", "nope"], "no run has this id"),
        (["--attach", ""], "is empty"),
        (["--attach", str(reported)], "was imported from a report"),
        (["--point", "0"], "has no effect without --attach"),
    ):
        code, out, err = diagnose(*args)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
    assert diagnose("--attach", RUN, "--seconds", "0")[0] == 2
    assert diagnose("--attach", RUN, "--seconds", "nan")[0] == 2


def test_without_a_run_it_is_this_host(diagnose: Nsa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code, out, _ = diagnose()
    assert code == 0
    assert "- CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel; unset CUDA_LAUNCH_BLOCKING" in out
    assert "- NUMA: " in out
