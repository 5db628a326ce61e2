"""A command, as tests call it in their own process: tests/orchestrator/cli/conftest.py has fixtures of `nsa`."""

import contextlib
import io
from collections.abc import Callable
from typing import NamedTuple

import pytest

from orchestrator.cli import commands


class Done(NamedTuple):
    """The result of a command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Nsa = Callable[..., Done]


def called(main: Callable[[], int | None]) -> Done:
    """The result of a command, its output kept; for properties, whose cases share the fixtures of one test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main() or 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def nsa(*args: str) -> Done:
    """The result of `nsa` with these arguments, in the environment as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["nsa", *args])
        return called(commands.main)
