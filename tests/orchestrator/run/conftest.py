"""A home, a spec and a fast probe for runs of the driver on this machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.point import Machine
from orchestrator.run.local import LocalExecutor

_SPEC = """
kind: snippet
name: test
codes: {codes}
retries: 0
resources: {{workers: {workers}}}
isolation: {isolation}
deadlines: {{startup_s: 60, heartbeat_s: 60, point_s: 600}}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NSA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Path]:
    """Writes a spec whose points run `codes`, with the lines `more` at its end."""

    def write(*codes: str, workers: int = 1, isolation: str = "process", more: str = "") -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(_SPEC.format(codes=list(codes), workers=workers, isolation=isolation) + more)
        return path

    return write


@pytest.fixture
def quick_probe(snippet_kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the probe, which imports torch in a child for two seconds."""
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: {None: Machine("cpu", "test", 8 << 30, {"torch": "0"})})


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP's default, which processes started here inherit; tests that run under nohup lack it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
