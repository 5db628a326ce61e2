"""Standard output that breaks, fills or is closed, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SAY = "from orchestrator.terminal import output_lost, prepare, say, warn; prepare()\n"
_MANY = _SAY + "for number in range(9): say(number)\n"
_END = "import sys; sys.stderr.write(f'went on, lost {output_lost()}\\n')"


def run(code: str, redirection: str, **env: str) -> str:
    """Run code with its output redirected by a shell, and return its stderr."""
    command = ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirection", "expected"),
    [
        ("| true; exit ${PIPESTATUS[0]}", "went on, lost False\n"),
        (">&-", "went on, lost False\n"),
        (
            ">/dev/full",
            "error: output: cannot be written (No space left on device); the rest is not shown\nwent on, lost True\n",
        ),
    ],
)
def test_output_that_cannot_be_written_is_dropped(redirection: str, expected: str, unbuffered: str) -> None:
    wait = "import time; time.sleep(0.3)\n"  # until the reader has ended
    assert run(wait + _MANY + _END, redirection, PYTHONUNBUFFERED=unbuffered) == expected
