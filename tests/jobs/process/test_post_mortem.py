"""Stacks within a bound, also where py-spy is stuck; what a process died of."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from jobs.process import post_mortem

HERE = psutil.Process()


def test_stacks_of_many_stuck_processes_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def tool(command: list[str], within: float) -> tuple[int, str]:
        time.sleep(within)
        return 1, "timed out\n"

    monkeypatch.setattr(post_mortem, "TOOL_S", 1.0)
    monkeypatch.setattr(post_mortem, "DUMPS_S", 1.5)
    monkeypatch.setattr(post_mortem, "_tool", tool)
    monkeypatch.setattr(post_mortem, "py_spy", lambda: "py-spy")
    begin = time.monotonic()
    texts = post_mortem.dumps([HERE] * 24)
    assert time.monotonic() - begin < 2.5  # three times 1 s
    assert [("timed out" in text, "not read within the 1.5 s" in text) for text in texts] == (
        [(True, False)] * 16 + [(False, True)] * 8
    )
    assert all(text.startswith(f"=== pid {HERE.pid}") for text in texts)


def test_a_tool_that_does_not_die_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi is where it waits in the kernel for a GPU's driver."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda tool: None)
    begin = time.monotonic()
    code, text = post_mortem._tool(["sleep", "8"], 0.3)
    assert time.monotonic() - begin < 5
    assert code
    assert "timed out after 0.3" in text


def test_oom_kills_are_read_from_both_versions_of_control_groups(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    paths = [tmp_path / "memory.events", tmp_path / "memory.oom_control", tmp_path / "missing"]
    monkeypatch.setattr(post_mortem, "_oom_counters", lambda: iter(paths))
    memory = post_mortem.MemoryWatch()
    assert post_mortem.oom_kills() == 5
    assert not memory.killed(-9)
    (tmp_path / "memory.events").write_text("oom_kill 3\n")
    assert (memory.killed(-9), memory.killed(-11)) == (True, False)


def test_an_exit_is_described() -> None:
    codes = [-9, -62, 3, None]
    assert [post_mortem.describe_exit(code) for code in codes] == [
        "killed by SIGKILL",
        "killed by signal 62",
        "exited with code 3 and no result",
        "cannot be killed: it is stuck in the kernel",
    ]


def test_the_end_of_a_long_log_is_its_tail(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(map(str, range(100_000))))
    assert post_mortem.tail(tmp_path / "log", 2) == "99998\n99999"
    assert post_mortem.tail(tmp_path / "missing", 2) == ""
