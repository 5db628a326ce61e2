"""Stacks of many processes: within a bound, also where py-spy is stuck or the host has no room for a thread."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest

from jobs.specs.spec import Deadlines
from orchestrator.attempt import diagnostics, ray_watches, watch
from orchestrator.attempt.ray_rank import NodeWatch, Placed
from orchestrator.attempt.supervisor import supervise
from orchestrator.messages import Assignment, Conditions
from orchestrator.store.records import ArtifactRecord, EventRecord, OutcomeRecord

HERE = psutil.Process()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy is stuck on each process, for as long as it may."""

    def tool(command: list[str], within: float | None = None) -> tuple[int, str]:
        time.sleep(diagnostics.TOOL_S if within is None else within)
        return 1, "timed out\n"

    monkeypatch.setattr(diagnostics, "TOOL_S", 1.0)
    monkeypatch.setattr(diagnostics, "DUMPS_S", 1.5)
    monkeypatch.setattr(diagnostics, "_tool", tool)
    monkeypatch.setattr(diagnostics, "py_spy", lambda: "py-spy")


@pytest.mark.usefixtures("stuck")
def test_stacks_of_many_stuck_processes_have_one_bound() -> None:
    begin = time.monotonic()
    texts = diagnostics.dumps([HERE] * 24)
    assert time.monotonic() - begin < 2.5  # three times 1 s
    assert [("timed out" in text, "not read within the 1.5 s" in text) for text in texts] == (
        [(True, False)] * 16 + [(False, True)] * 8
    )
    assert all(text.startswith(f"=== pid {HERE.pid}") for text in texts)


@pytest.mark.usefixtures("stuck")
def test_a_node_answers_with_flight_recorders_where_py_spy_is_stuck_on_all_its_ranks(tmp_path) -> None:
    (tmp_path / "flight-recorder-rank0.json").write_text("{}")
    ranks = [Placed(n, "node", "host", os.getpid(), None, str(tmp_path), {}) for n in range(24)]
    begin = time.monotonic()
    files = NodeWatch(ranks, 1, -1).explain()
    assert time.monotonic() - begin < 2.5
    assert files["flight-recorder-rank0.json"] == "{}"
    assert "not read" in files["stacks-rank23.txt"]


def test_who_waits_for_stacks_waits_longer_than_they_take() -> None:
    assert diagnostics.TOOL_S < diagnostics.DUMPS_S < diagnostics.STACKS_S < ray_watches.EXPLAIN_S < watch._EXPLAIN_S


@pytest.mark.usefixtures("full_host")
def test_stacks_are_read_without_a_thread() -> None:
    texts = diagnostics.dumps([HERE] * 3)
    assert len(texts) == 3
    assert all("not read" not in text and text.startswith(f"=== pid {HERE.pid}: ") for text in texts)


def test_stacks_are_read_by_the_threads_that_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(diagnostics, "_dump", lambda process, within: time.sleep(0.05) or "its stack")
    monkeypatch.setattr(threading.Thread, "start", begin)
    assert diagnostics.dumps([HERE] * 5) == ["its stack"] * 5


@pytest.mark.usefixtures("full_host")
def test_a_hang_is_a_hang_where_the_host_has_no_room_for_a_thread(snippet_kind, tmp_path) -> None:
    deadlines = Deadlines(startup_s=60, heartbeat_s=1, point_s=120)
    conditions = Conditions("cpu", deadlines, store=f"file://{tmp_path}")
    tasks = [Assignment("r", "r/0", 1, snippet_kind.point("beat('on')\nimport time\ntime.sleep(600)"))]
    updates = list(supervise(tasks, conditions))
    [outcome] = [update for update in updates if isinstance(update, OutcomeRecord)]
    assert outcome.state == "hang"
    told = "\n".join(update.message for update in updates if isinstance(update, EventRecord))
    assert "file not kept: 'stacks.txt': the host has no room for the thread that copies it (can't start" in told
    assert not [update for update in updates if isinstance(update, ArtifactRecord)]


@pytest.mark.usefixtures("full_host")
def test_a_gpu_point_without_room_for_a_thread_lacks_its_telemetry_alone(snippet_kind) -> None:
    conditions = Conditions("cuda", Deadlines(startup_s=60, heartbeat_s=60, point_s=120))
    tasks = [Assignment("r", "r/0", 1, snippet_kind.point("pass"))]
    [outcome] = [u for u in supervise(tasks, conditions, "0") if isinstance(u, OutcomeRecord)]
    assert outcome.state == "ok"
