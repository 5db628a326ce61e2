"""A sweep whose driver is started again, to resume its run, until every point is ok."""

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.schema.states import PointState
from orchestrator.run import plan
from orchestrator.store import journal

ROOT = Path(__file__).resolve().parents[2]
_SPEC = """
kind: snippet
name: {name}
device: cpu
codes: {codes}
retries: 10
deadlines: {{startup_s: 120, heartbeat_s: 60, point_s: 300}}
"""
_CODE = "import time\nfor _ in range({steps}): beat('sleeps'); time.sleep(0.1)\nvalue = {value}"
_AGAIN_S = 2.0
_UNLIMITED = resource.RLIM_INFINITY


class Sweep:
    """The points of one run.

    Attributes:
        codes: exit codes of its drivers so far.
    """

    def __init__(self, name: str, folder: Path, points: int, point_s: float) -> None:
        self.name = name
        self.points = points
        self.codes: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._folder = folder
        self._spec = folder / f"{name}.yaml"
        codes = [_CODE.format(steps=round(point_s * 10), value=value(number)) for number in range(points)]
        self._spec.write_text(_SPEC.format(name=name, codes=codes))
        self._again_at = 0.0
        self._began = 0.0

    @property
    def run_id(self) -> str | None:
        """The id of its run, once that has a journal with a beginning."""
        found = list((self._folder / "home" / "artifacts").glob(f"*-{self.name}-????"))
        assert len(found) <= 1, f"{self.name}: more than one run: {found}"
        return found[0].name if found and self.history(found[0]) is not None else None

    @property
    def path(self) -> Path:
        """Its journal."""
        return self._folder / "home" / "artifacts" / str(self.run_id) / journal.NAME

    def history(self, folder: Path) -> plan.History | None:
        path = folder / journal.NAME
        return plan.history(journal.read(path)) if path.is_file() else None

    @property
    def measures(self) -> bool:
        """Whether its driver has been measuring: a record of it is younger than its start."""
        return self.process is not None and self.run_id is not None and self.path.stat().st_mtime > self._began

    def last_line(self) -> str:
        """The last line that its latest driver told."""
        log = self.log(max(0, len(self.codes) - (self.process is None)))
        lines = log.read_text().splitlines() if log.exists() else []
        return lines[-1][:150] if lines else ""

    def done(self) -> bool:
        """Whether its driver has ended with every point ok."""
        if self.process is not None or not self.codes or self.codes[-1] != 0 or self.run_id is None:
            return False
        found = self.history(self.path.parent)
        points = [] if found is None else found.points.values()
        return [point.attempts[point.attempt].state for point in points] == [PointState.OK] * self.points

    def look(self, env: Callable[[], Mapping[str, str]], *, able: bool) -> str | None:
        """Start a driver if there is none and the cluster is `able` to serve it; return what happened."""
        if self.process is not None:
            if (code := self.process.poll()) is None:
                return None
            self.process, self._again_at = None, time.monotonic() + _AGAIN_S
            self.codes.append(code)
            return f"{self.name}: its driver ended with {code}"
        if not able or time.monotonic() < self._again_at or self.done():
            return None
        self.process = self.drive(env())
        self._began = time.time()
        return f"{self.name}: driver {self.process.pid} {'resumes ' + self.run_id if self.run_id else 'begins'}"

    def drive(self, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a driver, which resumes the run if it has begun."""
        arguments = ["--resume", self.run_id, "--retry-failed"] if self.run_id else [str(self._spec)]
        with self.log(len(self.codes)).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "jobs", *arguments], cwd=ROOT, env=env, stdout=log, stderr=log
            )

    def log(self, number: int) -> Path:
        """The output of its driver `number`, and of those that were refused beside it."""
        return self._folder / f"{self.name}.{number}.log"

    def end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def fill_disk(self) -> Callable[[], None]:
        """Let no file of its driver grow beyond the size of its journal; return what takes that back."""
        if self.process is None or self.run_id is None:
            return lambda: None
        driver = self.process
        resource.prlimit(driver.pid, resource.RLIMIT_FSIZE, (self.path.stat().st_size + 10, _UNLIMITED))

        def free() -> None:
            if driver.poll() is None:
                resource.prlimit(driver.pid, resource.RLIMIT_FSIZE, (_UNLIMITED, _UNLIMITED))

        return free


def value(number: int) -> float:
    """The value that a point measures: each its own, so that no two can be mistaken for each other."""
    return number + 0.5
