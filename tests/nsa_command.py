"""A command of `nsa`, as tests call it: tests/orchestrator/cli/conftest.py has the fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Done(NamedTuple):
    """The result of a command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Nsa = Callable[..., Done]
