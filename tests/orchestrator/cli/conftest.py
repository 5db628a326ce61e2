"""Commands of `nsa`, run in the test's process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.cli import commands

Nsa = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_nsa(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Nsa:
    """Runs a command and returns its exit code, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["nsa", *args])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return call
