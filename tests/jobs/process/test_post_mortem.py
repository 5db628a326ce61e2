"""What a process died of."""

from __future__ import annotations

from pathlib import Path

from jobs.process import post_mortem


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
