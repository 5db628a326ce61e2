"""A training that crashes, loses its driver, is cancelled, and goes on each time from its last checkpoint."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from homes import newest_checkpoint
from processes import descendants
from quick_driver import COMMAND
from trainings import by_name, write_text
from travelling import travelled

from jobs.schema.point import Machine, Metric
from jobs.specs.load import load_spec
from jobs.train import Spec, measure
from orchestrator.store import journal
from orchestrator.store.records import EventRecord, MetricData, OutcomeRecord

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(400)

_SPEC = """
kind: train
name: resumed
device: cpu
seq_len: 32
batch: 4
steps: 150
checkpoints: {every: 10}
restarts: 1
data: {path: TEXT, heldout_batches: 2}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(_SPEC.replace("TEXT", str(write_text(tmp_path / "text"))))
    return path


def _start(home: Path, *args: str) -> subprocess.Popen[str]:
    command, env = [*COMMAND, "--local", *args], {**os.environ, "NSA_HOME": str(home)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)


def _until(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _worker(driver: subprocess.Popen[str]) -> psutil.Process:
    return descendants(psutil.Process(driver.pid), "orchestrator.execute.point:answer")[0]


def test_a_training_goes_on_after_a_crash_a_killed_driver_and_a_cancellation(spec: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    driver = _start(home, str(spec))
    _until(lambda: newest_checkpoint(home) >= 10, driver)
    _worker(driver).kill()
    first = newest_checkpoint(home)
    _until(lambda: newest_checkpoint(home) > first, driver)  # the attempt that followed by itself
    worker = _worker(driver)
    driver.kill()
    assert psutil.wait_procs([worker], timeout=30)[1] == []  # until then it may save another checkpoint
    second = newest_checkpoint(home)
    (path,) = home.glob(f"artifacts/*/{journal.NAME}")
    driver = _start(home, "--resume", path.parent.name)
    _until(lambda: newest_checkpoint(home) > second, driver)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) == 130
    cancelled = newest_checkpoint(home)
    driver = _start(home, "--resume", path.parent.name)
    assert driver.wait(200) == 0, driver.communicate()[0]
    records = list(journal.read(path))
    outcomes = [record for record in records if isinstance(record, OutcomeRecord)]
    assert [outcome.state for outcome in outcomes] == ["crash", "lost", "cancelled", "ok"]
    assert [outcome.attempt for outcome in outcomes] == [1, 2, 3, 4]
    (event,) = [record for record in records if isinstance(record, EventRecord) and record.level == "warning"]
    assert "attempt 1 crashed (killed by SIGKILL); handed out again" in event.message
    metrics: dict[str, MetricData] = {metric.name: metric for metric in outcomes[-1].metrics}
    assert list(metrics["resumed_step"].samples)[-1] == cancelled
    assert len(metrics["resumed_step"].samples) == 3
    assert metrics["loss"].samples == _uninterrupted(spec)["loss"].samples, "bit by bit"


def _uninterrupted(spec: Path) -> dict[str, Metric]:
    """Metrics of the same training on one rank, in this process and without checkpoints."""
    loaded = load_spec(spec)
    assert isinstance(loaded, Spec)
    case = travelled(loaded.points(Machine("cpu", "test", 8 << 30))[0])
    return by_name(measure(case.model_copy(update={"checkpoints": None}), lambda *_: None))
