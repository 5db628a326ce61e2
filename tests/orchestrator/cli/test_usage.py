"""Mistakes on the command line: one line with field, value and fix for every command, exit code 2."""

from __future__ import annotations

import re

import pytest
from nsa_command import Nsa

MISUSED = [
    # arguments, the line expected
    (["runs", "--limit", "9" * 20], r"--limit: '9+': .*less than or equal to 1000000.*; .* `nsa runs --help`"),
    (["runs", "--limit", "9" * 5000], r"--limit: '9+… \(.*"),
    (["runs", "--limit", "x"], r"--limit: 'x': .*integer.*; .*"),
    (["runs", "--limit"], r"--limit: requires an argument; see .*"),
    (["runs", "--limt", "3"], r"--limt: is no option of `nsa runs`; use --limit"),
    (["runs", "--\x1b[31m"], r"--\\x1b\[31m: is no option of `nsa runs`; see `nsa runs --help`"),
    (["runs", "--state", "finished"], r"--state: 'finished': is not one of 'pending', .*; give another, .*"),
    (["diagnose", "--seconds", "nan"], r"--seconds: 'nan': .*; give another, see `nsa diagnose --help`"),
    (["report", "--format", "docx"], r"--format: 'docx': is not one of 'md', .*; give another, .*"),
    (["show"], r"RUN: is missing; give it, see `nsa show --help`"),
    (["submit"], r"SPEC: is missing; give it, see `nsa submit --help`"),
    (["export"], r"--out: is missing; give it, see `nsa export --help`"),
    (["show", "a", "b", "c"], r"b c: is too much for `nsa show`; see `nsa show --help`"),
    (["nope"], r"nope: is no command of `nsa`; see `nsa --help`"),
    (["db", "nope"], r"nope: is no command of `nsa db`; see `nsa db --help`"),
    (["--nope"], r"--nope: is no option of `nsa`; see `nsa --help`"),
]


@pytest.mark.parametrize(("args", "line"), MISUSED, ids=[" ".join(args)[:20] for args, _ in MISUSED])
def test_a_mistake_on_the_command_line_is_one_line(nsa: Nsa, args: list[str], line: str) -> None:
    code, out, err = nsa(*args)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: {line}\n", err), err


def test_without_a_command_the_help_is_shown(nsa: Nsa) -> None:
    for args in ([], ["db"]):
        code, out, err = nsa(*args)
        assert code == 2
        assert "Usage: nsa" in out + err
        assert "error" not in err
