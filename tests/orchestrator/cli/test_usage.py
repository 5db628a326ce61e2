"""Mistakes on the command line: one line with field, value and where the usage is; exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from nsa_command import Nsa

MISUSED = [
    # arguments, the line expected
    (["runs", "--limit", "9" * 20], r"'--limit': .*less than or equal to 1000000, not '9+'; see `nsa runs --help`"),
    (["runs", "--limt", "3"], r".*: --limt .*--limit.*; see `nsa runs --help`"),
    (["runs", "--\x1b[31m"], r".*: --\\x1b\[31m; see `nsa runs --help`"),
    (["export"], r"--out: is missing; give it, see `nsa export --help`"),
    (["show", "a", "b", "c"], r".*\(b c\); see `nsa show --help`"),
]


@pytest.mark.parametrize(("args", "line"), MISUSED, ids=[" ".join(args)[:20] for args, _ in MISUSED])
def test_a_mistake_on_the_command_line_is_one_line(nsa: Nsa, args: list[str], line: str) -> None:
    code, out, err = nsa(*args)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: .*{line}\n", err), err


def test_the_help_imports_nothing_heavy() -> None:
    code = "import sys; from orchestrator.cli.commands import app; app(['--help'], standalone_mode=False)"
    heavy = "print({'pandas', 'sqlalchemy', 'ray', 'torch', 'altair'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", f"{code}; {heavy}"], capture_output=True, text=True, check=True)
    assert "diagnose" in done.stdout
    assert done.stdout.endswith("set()\n")
