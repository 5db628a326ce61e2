"""A home, a spec and a fast probe for runs of the driver on this machine."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from quick_driver import COMMAND, MACHINE

from orchestrator.execute.local import LocalExecutor

ROOT = Path(__file__).resolve().parents[3]
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
        path.write_text(_SPEC.format(codes=json.dumps(codes), workers=workers, isolation=isolation) + more)
        return path

    return write


@pytest.fixture
def quick_probe(snippet_kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the probe, which imports torch in a child for two seconds."""
    monkeypatch.setattr(LocalExecutor, "probe", lambda self: {None: MACHINE})


@pytest.fixture
def start(home: Path, kinds_path: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `python -m jobs --local` with the settings of this process and the quick probe; ends what is left."""
    with ExitStack() as stack:

        def begin(*args: str | Path, command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*command, "--local", *map(str, args)],
                cwd=ROOT,
                env={**os.environ, **kinds_path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """SIGHUP's default, which processes started here inherit; tests that run under nohup lack it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
