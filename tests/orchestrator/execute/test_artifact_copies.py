"""Files of real points on their way to the store: names, failures that cost only themselves, a store that hangs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from ftp_server import ftp_server

from jobs.specs.spec import Deadlines
from orchestrator.execute import artifacts
from orchestrator.execute.artifacts import Source
from orchestrator.execute.supervisor import Assignment, Conditions, supervise
from orchestrator.store.records import ArtifactRecord, EventRecord, OutcomeRecord, Progress

CONDITIONS = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=60, point_s=120))
TASK = Assignment("r", "r/7", 1, None)  # type: ignore[arg-type]  # its point is not looked at


@pytest.fixture
def measure(snippet_kind, tmp_path: Path) -> Callable[..., list]:
    """Runs pieces of code as points that keep their files in `tmp_path`/store, and returns all updates."""

    def run(*codes: str, **changes: Any) -> list:
        conditions = dataclasses.replace(CONDITIONS, **{"store": f"file://{tmp_path / 'store'}", **changes})
        assignments = [Assignment("r", f"r/{i}", 1, snippet_kind.point(code, i)) for i, code in enumerate(codes)]
        return list(supervise(assignments, conditions))

    return run


def texts(updates: list) -> dict[str, str]:
    """Point and name -> text in the database."""
    files = [update for update in updates if isinstance(update, ArtifactRecord)]
    return {f"{file.point_id[-1]} {file.artifact.name}": str(file.artifact.content) for file in files}


def warnings(updates: list) -> list[str]:
    return [f"{u.point_id[-1]} {u.message}" for u in updates if isinstance(u, EventRecord) and u.point_id]


def states(updates: list) -> list[str]:
    return [str(update.state) for update in updates if isinstance(update, OutcomeRecord)]


def test_a_file_that_cannot_be_kept_costs_only_itself(measure) -> None:
    code = """import pathlib
files = {'..': 'up', 'a/b': 'aside', '': 'none', 'stdout.txt': 'mine', 'gone.bin': pathlib.Path('/nowhere/gone.bin'),
         'zero\\0.txt': 'nul', 'last.txt': 'kept'}
print('said')"""
    updates = measure(code, "files = {'other.txt': 'kept'}")
    assert states(updates) == ["ok", "ok"]
    assert texts(updates) == {"0 stdout.txt": "said\n", "0 last.txt": "kept", "1 other.txt": "kept"}
    messages = warnings(updates)
    assert len(messages) == 6
    assert all(message.startswith("0 file not kept: ") for message in messages)
    for part in ("'..': is no plain", "'a/b': is no plain", "'': is no plain", r"'zero\x00.txt': is no plain"):
        assert sum(part in message for message in messages) == 1
    assert sum("'stdout.txt': another file of this attempt has this name" in message for message in messages) == 1
    assert sum("'gone.bin': its file cannot be read: FileNotFoundError" in message for message in messages) == 1


def test_a_store_that_goes_away_in_mid_run_costs_files_and_no_point(measure, tmp_path) -> None:
    with ftp_server(tmp_path / "ftp") as server:
        kill = f"import signal\nos.kill({server.process.pid}, signal.SIGKILL)\nfiles = {{'a.txt': 'lost'}}"
        updates = measure("files = {'a.txt': 'kept'}", kill, "value = 2.0", store=server.url)
    assert states(updates) == ["ok", "ok", "ok"]
    assert texts(updates) == {"0 a.txt": "kept"}
    [warning] = warnings(updates)
    assert warning.startswith("1 file not kept: the artifact store ftp://")


class Hanging(MemoryFileSystem):
    """A store that never answers a write."""

    protocol = "hanging"
    asked = threading.Event()

    def _open(self, *_: Any, **__: Any) -> Any:
        self.asked.set()
        time.sleep(600)


@pytest.fixture
def hanging() -> str:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.asked.clear()
    return "hanging://place"


def rest(store: str, *sources: Source, stopped: Callable[[], bool] = lambda: False) -> list:
    """The records of the files of an attempt's end."""
    with artifacts.ArtifactCopies(TASK.ids, store) as copies:
        return list(copies.rest(sources, stopped))


def test_a_store_that_hangs_holds_up_no_deadline_and_no_live_series(hanging: str, snippet_kind, monkeypatch) -> None:
    monkeypatch.setattr(artifacts, "STALL_S", 3600.0)
    code = """import time
beat.keep('rank0.json', '{}')
for step in range(40):
    beat('train', step, 40)
    beat.sample(step, {'time': 1.0})
    time.sleep(0.1)
time.sleep(600)"""
    deadlines = Deadlines(startup_s=60, heartbeat_s=3, point_s=120)
    conditions = dataclasses.replace(CONDITIONS, deadlines=deadlines, store=hanging)
    seen: list = []
    for update in supervise([Assignment("r", "r/0", 1, snippet_kind.point(code))], conditions):
        seen.append(update)
        if isinstance(update, OutcomeRecord):
            break
    assert states(seen) == ["hang"]
    assert len([update for update in seen if isinstance(update, Progress) and update.phase == "train"]) > 2
    assert [update for update in seen[:-2] if isinstance(update, tuple)], "before the end"


def test_files_of_a_store_that_hangs_are_given_up_with_a_warning_each(hanging: str, monkeypatch) -> None:
    monkeypatch.setattr(artifacts, "STALL_S", 1.0)
    message = "the artifact store hanging://place did not answer for 1 s"
    records = rest(hanging, Source("a.txt", "a"), Source("b.txt", "b"))
    assert warnings(records) == [f"7 file not kept: {name!r}: {message}" for name in ("a.txt", "b.txt")]


def test_a_stop_does_not_wait_for_a_store_that_hangs(hanging: str) -> None:
    assert rest(hanging, Source("a.txt", "a"), stopped=Hanging.asked.is_set) == []
