"""Waiting in tests: for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], bool], seconds: float = 20, log: Callable[[], str] = str, *, pause: float = 0.05
) -> None:
    """Wait until a condition holds, asking every `pause` seconds; fail with the log's text after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(pause)
