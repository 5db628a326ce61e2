"""One chaos run: the sweeps, the faults when they are due, and the checks at the end."""

import heapq
import itertools
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos import checks
from chaos.nodes import Nodes
from chaos.schedule import Fault, Kind
from chaos.sweep import Sweep
from postgres_process import Postgres
from processes import free_ports
from ray_clusters import Cluster, point_processes

from orchestrator.store import upgrade

_TICK_S = 0.5
_GRACE_S = 20.0
_HEAD_GONE_S = 120.0
_PATIENCE_MIN = 10.0  # after the last fault, until all points are ok
_TRY_AGAIN_S = 3.0
_BUSY = 0.4  # of the time, if nothing failed


@dataclass
class Beside:
    """A second driver of a run, and the first one, which measures it."""

    sweep: Sweep
    first: subprocess.Popen[bytes] | None
    process: subprocess.Popen[bytes]


class Run:
    """Faults that befall two sweeps."""

    def __init__(self, folder: Path, faults: Sequence[Fault], minutes: float, points: int) -> None:
        self._folder = folder
        self._minutes = minutes
        self._faults = faults
        self._points = points
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._done = Counter[Kind]()
        self._found: list[str] = []
        self._beside: list[Beside] = []
        self._able = True
        self._broken = False  # Postgres
        self._actions: dict[Kind, Callable[[Fault], str | None]] = {
            Kind.DRIVER: lambda fault: self._signal(fault, signal.SIGKILL),
            Kind.CANCEL: lambda fault: self._signal(fault, signal.SIGTERM),
            Kind.RESUME: self._resume,
            Kind.WORKER: lambda fault: self._kill_point(fault, supervisor=True),
            Kind.POINT: lambda fault: self._kill_point(fault, supervisor=False),
            Kind.RAYLET: self._kill_raylet,
            Kind.HEAD: self._kill_head,
            Kind.FREEZE: lambda fault: self._break_postgres(fault, self._postgres.freeze, self._postgres.thaw),
            Kind.STOP: lambda fault: self._break_postgres(fault, self._postgres.stop, self._postgres.start),
            Kind.DISK: self._fill_disk,
        }

    def problems(self) -> list[str]:
        """Run it to its end. Returns what did not hold."""
        with ExitStack() as ends:
            ends.callback(self._kill_rest)
            env = Cluster("", "", self._folder).env(self._folder / "home")
            (self._folder / "pg").mkdir()
            self._folder.chmod(0o755)
            self._postgres = Postgres(self._folder / "pg", free_ports(1)[0], env)
            upgrade(self._postgres.url)
            self._nodes = Nodes(self._folder, env)
            ends.callback(self._nodes.stop)
            point_s = _BUSY * 60 * self._minutes * self._nodes.slots / self._points
            half = self._points // 2
            self._sweeps = [Sweep(f"sweep{number}", self._folder, half, point_s) for number in (1, 2)]
            self._begun = time.monotonic()
            for fault in self._faults:
                self._at(fault.at_s, lambda fault=fault: self._befall(fault))
            self._watch()
            self._check()
        return self._found

    def _watch(self) -> None:
        """Let faults happen and drivers resume, until all faults have happened and all points are ok."""
        deadline = 60 * (self._minutes + _PATIENCE_MIN)
        while self._due or not all(sweep.done() for sweep in self._sweeps):
            if self._now() > deadline:
                self._found.append(f"not every point was ok {_PATIENCE_MIN:g} minutes after the last fault")
                return
            while self._due and self._due[0][0] <= self._now():
                heapq.heappop(self._due)[2]()
            for sweep in self._sweeps:
                if event := sweep.look(self._environment, able=self._able):
                    self._say(f"{event}  {sweep.last_line()}")
            self._look_beside()
            time.sleep(_TICK_S)

    def _check(self) -> None:
        self._say(f"faults: {', '.join(f'{kind} {count}' for kind, count in self._done.items())}")
        for sweep in self._sweeps:
            self._say(f"{sweep.name}: drivers ended with {sweep.codes}")
        if missing := set(Kind) - set(self._done):
            self._found.append(f"never happened: {', '.join(sorted(missing))}")
        self._within(
            _GRACE_S, lambda: (f"a point's process is left: {p}" for p in point_processes(self._nodes.cluster))
        )
        self._within(_GRACE_S, lambda: checks.handles(self._nodes.workers(), self._postgres.url))
        for sweep in self._sweeps:
            self._found += [*checks.drivers(sweep), *checks.accounts(sweep, self._postgres.url, self._folder)]
        self._nodes.stop()
        self._postgres.stop()
        self._within(_GRACE_S, lambda: checks.processes(self._mark))
        self._found += checks.leftovers(self._folder / "tmp")

    def _within(self, seconds: float, check: Callable[[], Iterator[str]]) -> None:
        """Take what a check finds once it finds nothing, or after some time."""
        deadline = time.monotonic() + seconds
        while (found := list(check())) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        self._found += found

    def _environment(self) -> dict[str, str]:
        """The environment of a driver."""
        return self._nodes.cluster.env(self._folder / "home") | {"NSA_DATABASE_URL": self._postgres.url}

    @property
    def _mark(self) -> str:
        return f"TMPDIR={self._folder}/"

    def _kill_rest(self) -> None:
        for process in checks.marked(self._mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _say(self, line: str) -> None:
        print(f"{self._now():6.1f} s  {line}", flush=True)

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._count), do))

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        self._at(self._now() + seconds, do)

    def _now(self) -> float:
        """Seconds since the start, without those in which this process itself mended something."""
        return time.monotonic() - self._begun

    @contextmanager
    def _mending(self, done: str) -> Iterator[None]:
        """Stop the clock, so that the next faults do not all fall into the same moment on a slow machine."""
        begun = time.monotonic()
        yield
        self._begun += time.monotonic() - begun
        self._say(f"{done}, {time.monotonic() - begun:.0f} s later")

    def _befall(self, fault: Fault) -> None:
        """Let a fault happen, or later if there is nothing now that it can befall."""
        said = self._actions[fault.kind](fault)
        if said is not None:
            self._done[fault.kind] += 1
            self._say(f"{fault.kind}: {said}")
        elif not all(sweep.done() for sweep in self._sweeps):
            self._after(_TRY_AGAIN_S, lambda: self._befall(fault))

    def _running(self, fault: Fault, began: bool = False) -> Sweep | None:
        found = [s for s in self._sweeps if s.process is not None and s.process.poll() is None]
        found = [s for s in found if not began or s.measures]
        return found[int(fault.pick * len(found))] if found else None

    def _signal(self, fault: Fault, number: signal.Signals) -> str | None:
        if (sweep := self._running(fault)) is None:
            return None
        sweep.end(number)
        return f"{number.name} to the driver of {sweep.name}"

    def _resume(self, fault: Fault) -> str | None:
        sweep = self._running(fault, began=True)
        if sweep is None or self._broken:
            return None
        self._beside.append(Beside(sweep, sweep.process, process := sweep.drive(self._environment())))
        return f"driver {process.pid} beside that of {sweep.name}"

    def _look_beside(self) -> None:
        for beside in [one for one in self._beside if one.process.poll() is not None]:
            self._beside.remove(beside)
            code, sweep = beside.process.returncode, beside.sweep
            self._say(f"{sweep.name}: the driver beside it ended with {code}")
            if sweep.process is beside.first and code != 2:
                self._found.append(f"{sweep.name}: a second driver was not refused: it ended with {code}")

    def _kill_point(self, fault: Fault, *, supervisor: bool) -> str | None:
        found = sorted(point_processes(self._nodes.cluster), key=lambda process: process.pid) if self._able else []
        if not found:
            return None
        point = found[int(fault.pick * len(found))]
        with suppress(psutil.NoSuchProcess):
            victim = point.parent() if supervisor else point
            if victim is not None:
                victim.kill()
                return f"{victim.pid}"
        return None

    def _kill_raylet(self, fault: Fault) -> str | None:
        if not self._able:
            return None
        cluster, name = self._nodes.cluster, self._nodes.kill_raylet(fault.pick)

        def join() -> None:
            if self._able and self._nodes.cluster is cluster:
                with self._mending(f"{name} is back"):
                    self._nodes.stop(name)
                    self._nodes.join(name)

        self._after(fault.lasts_s, join)
        return name

    def _kill_head(self, fault: Fault) -> str | None:
        if not self._able or not any(sweep.process for sweep in self._sweeps):
            return None
        self._nodes.kill_head()
        self._able = False
        deadline = self._now() + _HEAD_GONE_S

        def restart() -> None:
            left = [sweep.name for sweep in self._sweeps if sweep.process is not None]
            if left and self._now() < deadline:
                self._after(1, restart)
                return
            if left:
                self._found.append(f"{left}: did not end within {_HEAD_GONE_S:g} s without a head")
            with self._mending("another cluster is there"):
                self._nodes.stop()
                self._nodes.start()
            self._able = True

        self._after(1, restart)
        return "drivers are to end; then another cluster is started"

    def _break_postgres(self, fault: Fault, broken: Callable[[], None], mend: Callable[[], None]) -> str | None:
        if self._broken:
            return None
        broken()
        self._broken = True

        def mended() -> None:
            with self._mending("Postgres is back"):
                mend()
            self._broken = False

        self._after(fault.lasts_s, mended)
        return f"for {fault.lasts_s:.1f} s"

    def _fill_disk(self, fault: Fault) -> str | None:
        sweep = self._running(fault, began=True)
        if sweep is None:
            return None
        free = sweep.fill_disk()
        self._after(fault.lasts_s, free)
        return f"of {sweep.name} for {fault.lasts_s:.1f} s"
