"""Commands of `nsa`, run in the test's process."""

from pathlib import Path

import pytest
from nsa_command import Done, Nsa

from orchestrator.cli import commands


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, without a cluster, and a wide terminal."""
    monkeypatch.setenv("NSA_HOME", str(tmp_path))
    monkeypatch.setenv("NSA_RAY_DASHBOARD", "http://127.0.0.1:1")  # nothing answers there
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def run_nsa(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Nsa:
    """Runs a command in the environment as it is."""

    def call(*args: str) -> Done:
        monkeypatch.setattr("sys.argv", ["nsa", *args])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        return Done(int(ended.value.code or 0), *capfd.readouterr())

    return call


@pytest.fixture
def nsa(home: Path, run_nsa: Nsa) -> Nsa:
    """Runs a command in the test's home."""
    return run_nsa
