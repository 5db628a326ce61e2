"""The states in which a point can end, with real child processes, and its pace: steps a second on the wall clock."""

import dataclasses
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from processes import is_alive
from supervised import Ended, supervised

from jobs.hardware.telemetry import TelemetrySummary
from jobs.process import child, messages
from jobs.process.child import Channel
from jobs.process.messages import MeasurePoint
from jobs.schema.point import WAITING, Interrupted, Measurement, Metric, Samples
from jobs.schema.quantities import GPU_UTILIZATION
from jobs.schema.states import PointState
from jobs.specs.spec import Deadlines
from orchestrator.execute import point, supervisor
from orchestrator.execute.live import Pace
from orchestrator.execute.point import measure_point
from orchestrator.execute.supervisor import Assignment, Conditions, supervise
from orchestrator.store.records import ArtifactRecord, OutcomeRecord, Progress, StartRecord

PATIENT = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=60, point_s=120))
HASTY = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=1, point_s=120))  # for points that are silent on purpose


@pytest.fixture
def measure(snippet_kind, tmp_path) -> Callable[..., list]:
    """Runs pieces of code as points and returns all updates, with each outcome as Ended."""

    def run(*codes: str, conditions: Conditions = PATIENT, **options) -> list:
        points = [snippet_kind.point(code, number) for number, code in enumerate(codes)]
        return supervised(points, conditions, tmp_path / "store", **options)

    return run


def ended(updates: list) -> list[Ended]:
    return [update for update in updates if isinstance(update, Ended)]


def states(updates: list) -> list[PointState]:
    return [e.outcome.state for e in ended(updates)]


def test_a_point_that_writes_without_end_holds_up_no_deadline(measure) -> None:
    beats = messages.encode(messages.Beat("p" * 5_000, 0, 0)) * 13
    flood = f"while True: os.write(int(sys.argv[1]), {beats!r})"
    short = Conditions("cpu", Deadlines(startup_s=60, heartbeat_s=60, point_s=1.5))
    [late] = [end.outcome for end in ended(measure(flood, conditions=short))]
    assert (late.state, late.metrics) == (PointState.TIMEOUT, ())
    assert str(late.reason).startswith("not done after 1.5 s (last in phase 'ppp")


def test_an_ok_point_has_metrics_route_environment_and_files(measure) -> None:
    updates = measure("beat('timing', 1, 2); print('said'); value = 2.5; files = {'a.txt': 'text'}")
    assert isinstance(updates[0], StartRecord)
    assert [type(update) for update in updates[-3:]] == [Ended, ArtifactRecord, ArtifactRecord]  # the outcome first
    outcome, files = updates[-3].outcome, updates[-3].files
    assert (outcome.state, outcome.reason, outcome.attempt) == (PointState.OK, None, 1)
    assert [(m.name, m.value, m.unit) for m in outcome.metrics] == [("time", 2.5, "ms")]
    assert outcome.route == {"all": "snippet"}
    assert outcome.environment["threads"] == "1"
    assert files == {"a.txt": "text", "stdout.txt": "said\n"}


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        ("os.kill(os.getpid(), 9)", PointState.CRASH, "killed by SIGKILL"),
        ("os._exit(0)", PointState.CRASH, "exited with code 0 and no result"),
        ("raise ValueError('wrong')", PointState.ERROR, "ValueError: wrong"),
        ("raise MemoryError", PointState.OOM, "MemoryError"),
        ("import time\nbeat('first')\ntime.sleep(60)", PointState.HANG, "no progress for 1 s (last in phase 'first')"),
    ],
)
def test_a_point_that_fails_has_its_own_state_and_no_numbers(measure, code, state, reason) -> None:
    [end] = ended(measure(code, conditions=HASTY))
    assert (end.outcome.state, end.outcome.reason) == (state, reason)
    assert end.outcome.metrics == ()


HANG_WITH_A_FAMILY = """
import subprocess, tempfile, time
from pathlib import Path
from jobs.schema.point import FAILURE_FILES
def stuck_here():
    time.sleep(600)
folder = Path(tempfile.gettempdir(), FAILURE_FILES)
folder.mkdir()
(folder / 'flight.json').write_text('1')
near = subprocess.Popen([sys.executable, '-c', 'import time\\ndef waiting_too(): time.sleep(600)\\nwaiting_too()'])
far = subprocess.Popen(['sleep', '600'], start_new_session=True)
print(near.pid, far.pid, flush=True)
leave = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, '-c', leave], start_new_session=True)  # forked twice: its parent is gone
time.sleep(0.5)
beat('on')
stuck_here()
"""


def test_a_hang_leaves_the_stacks_of_its_process_tree_and_no_process(measure) -> None:
    [end] = ended(measure(HANG_WITH_A_FAMILY, conditions=HASTY))
    assert end.outcome.state is PointState.HANG
    assert end.files["flight.json"] == "1", "what the point wrote about its failure"
    assert "stuck_here" in end.files["stacks.txt"]
    assert "waiting_too" in end.files["stacks.txt"]
    assert "stuck_here" in end.files["stderr.txt"]  # by faulthandler, for hosts where py-spy may not attach
    assert "memory: " in end.files["memory.txt"]
    pids = end.files["stdout.txt"].split()
    assert len(pids) == 3
    for pid in pids:
        assert f"pid {pid} " in end.files["processes.txt"]
        assert not is_alive(int(pid))


@pytest.mark.parametrize("env", ["", ", env={}"], ids=["", "without its variables"])
def test_daemons_of_a_point_that_died_end_with_it(measure, env: str) -> None:
    start = f"print(subprocess.Popen(['sleep', '600'], start_new_session=True{env}).pid, flush=True)"
    daemons = f"import subprocess; subprocess.run([sys.executable, '-c', \"import subprocess; {start}\"])"
    [end] = ended(measure(f"{daemons}\nos._exit(1)"))
    assert end.outcome.state is PointState.CRASH
    assert not is_alive(int(end.files["stdout.txt"]))


def test_a_warm_child_serves_until_a_point_is_not_ok(measure) -> None:
    codes = ["print('a')", "print('b')", "raise ValueError", "pass", "os._exit(1)", "pass"]
    ends = ended(measure(*codes, conditions=dataclasses.replace(PATIENT, warm=True)))
    pids = [end.outcome.environment.get("pid") for end in ends]
    assert [e.outcome.state for e in ends] == ["ok", "ok", "error", "ok", "crash", "ok"]
    assert pids[0] == pids[1] != pids[3] != pids[5]
    assert [end.files.get("stdout.txt") for end in ends[:2]] == ["a\n", "b\n"]  # each point's own output


def test_a_used_child_without_room_hands_its_point_to_a_fresh_one(measure) -> None:
    fits_alone = "import builtins\nif hasattr(builtins, 'used'): raise MemoryError('2 GiB of 3 GiB reserved are free')"
    codes = ["import builtins\nbuiltins.used = True", fits_alone, "raise MemoryError('never fits')"]
    updates = measure(*codes, conditions=dataclasses.replace(PATIENT, warm=True))
    assert states(updates) == ["ok", "ok", "oom"]
    warnings = [str(update) for update in updates if "measured again in a fresh process" in str(update)]
    assert len(warnings) == 2
    assert "2 GiB of 3 GiB reserved are free" in warnings[0]


def test_a_kill_by_the_kernels_oom_killer_is_oom(measure, monkeypatch) -> None:
    counts = iter([7])
    monkeypatch.setattr("jobs.process.child.oom_kills", lambda: next(counts, 8))
    [end] = ended(measure("os.kill(os.getpid(), 9)"))
    assert end.outcome.state is PointState.OOM


def test_a_stop_ends_the_child_at_once_and_without_an_outcome(snippet_kind) -> None:
    task = Assignment("r", "r/0", 1, snippet_kind.point("import time\nbeat('on', os.getpid())\ntime.sleep(600)"))
    stop = threading.Event()
    updates = supervise([task], PATIENT, stopped=stop.is_set)
    sign = next(update for update in updates if isinstance(update, Progress))
    stop.set()
    assert not [update for update in updates if isinstance(update, OutcomeRecord)]
    assert not is_alive(sign.done)


def test_telemetry_of_a_gpu_point_is_added(measure, monkeypatch) -> None:
    class Fake:
        def __init__(self, gpu_ids) -> None:
            assert list(gpu_ids) == ["0"]

        def start(self) -> None: ...

        def stop(self) -> TelemetrySummary:
            return TelemetrySummary((Metric("gpu_utilization", "%", 50.0), Metric("time", "ms", 0.0)), "sampled\n")

        def readings(self) -> list[Samples]:
            name, unit = GPU_UTILIZATION.name, {GPU_UTILIZATION.name: GPU_UTILIZATION.unit}
            return [Samples(rank, 7, 1e9, {name: 50.0 + rank}, unit) for rank in range(2)]

    monkeypatch.setattr(supervisor, "Telemetry", Fake)
    cuda = dataclasses.replace(PATIENT, device="cuda")
    updates = measure("pass", "raise ValueError", conditions=cuda, gpus="0")
    good, bad = ended(updates)
    series = [record for update in updates if isinstance(update, tuple) for record in update]
    assert {(s.point_id, s.name, s.unit, s.rank, s.steps[0], s.values[0]) for s in series} == {
        (point, "gpu_utilization", "%", rank, 7, 50.0 + rank) for point in ("r/0", "r/1") for rank in range(2)
    }
    assert {m.name: m.value for m in good.outcome.metrics} == {"time": 1.0, "gpu_utilization": 50.0}
    assert good.files["telemetry.txt"] == bad.files["telemetry.txt"] == "sampled\n"
    assert bad.outcome.metrics == ()


def test_a_text_is_kept_while_its_point_runs(measure, tmp_path) -> None:
    kept = str(tmp_path / "store" / "r" / "0000" / "1" / "rank0.json")
    wait = f"while not os.path.exists({kept!r}): time.sleep(0.01)\ntime.sleep(1)"  # its record follows
    updates = measure(f"import time\nbeat.keep('rank0.json', '{{}}')\n{wait}\nbeat.keep('rank0.json', 'late')")
    places = [place for place, update in enumerate(updates) if isinstance(update, ArtifactRecord)]
    (end,) = [place for place, update in enumerate(updates) if isinstance(update, Ended)]
    assert places[0] < end
    assert updates[places[0]].artifact.content == "{}"
    assert updates[end].files == {"rank0.json": "{}", "rank0-2.json": "late"}


def test_no_progress_since_the_start_is_a_hang_after_the_start_up_deadline(measure) -> None:
    conditions = Conditions("cpu", Deadlines(startup_s=1.5, heartbeat_s=60, point_s=60))
    [end] = ended(measure("import time; time.sleep(60)", conditions=conditions))
    assert end.outcome.state is PointState.HANG
    assert "start-up" in str(end.outcome.reason)


def test_deadlines_count_from_the_end_of_waiting(monkeypatch) -> None:
    now, beats = [0.0], [messages.Beat(WAITING + "room", 0, 2)]
    monkeypatch.setattr("jobs.process.child.time", SimpleNamespace(monotonic=lambda: now[0]))
    process: Any = SimpleNamespace(
        alive=lambda: True, note_descendants=lambda: None, inbox=SimpleNamespace(receive=lambda wait: beats)
    )
    watch = child.DeadlineWatch(process, startup_s=8, heartbeat_s=8, whole_s=8, _start=0.0)
    for now[0] in (1, 8, 15, 22):
        assert watch.step()[1] is None
    beats[:] = [messages.Beat("train", 1, 2)]
    for now[0] in (23, 28):
        assert watch.step()[1] is None
    now[0] = 30
    assert watch.step()[1] == child.Ended(PointState.TIMEOUT, "not done after 8 s (last in phase 'train')")


@pytest.mark.parametrize(
    ("reads", "milliseconds", "problem"),
    [
        ({1.0: "time", 1.2: "", 1.6: "timed"}, 550, None),
        ({1.0: "time", 3.9: "", 4.1: "timed"}, 3000, None),
        ({1.0: "time", 3.9: "", 4.1: "timed"}, 2000, None),  # stopped before the first sample
        ({1.0: "time", 3.9: "", 4.1: "timed"}, 500, "took 0.5 s by the process's clock, 2.9 to 3.2 s by"),
        ({1.0: "time", 1.2: "", 1.6: "timed"}, 1000, None),  # held up before the first beat
        ({1.0: "time", 1.2: "", 1.6: "timed"}, 2000, "took 2 s by the process's clock, 0.2 to 0.7 s by"),
        ({1.0: "time", 61.0: "timed"}, 500, None),  # read late: it may have come at once, or now
        ({61.0: "time timed"}, 50_000, None),
        ({1.0: "first run", 61.0: ""}, 500, None),  # timed by a kind's own means
        ({1.0: "time", 3.9: "", 4.1: "timed", 4.2: "warm-up", 9.0: "time", 9.1: "timed"}, 0, "took 0 s by"),
        ({1.0: "repeat", 3.9: "", 4.1: "repeated"}, 1000, None),  # on a busier host
        ({1.0: "repeat", 5.1: "repeat", 5.3: "repeated"}, 1001, None),  # waited for a processor
        ({1.0: "repeat", 5.1: "repeat", 5.3: "repeated"}, 1000, "took 1 s by the process's clock, 4.1 to 4.4 s by"),
        ({1.0: "repeat", 5.4: "", 5.6: "timed repeated"}, 3000, "took 3 s by the process's clock, 4.4 to 4.7 s by"),
        ({1.0: "repeat", 61.0: "warm-up", 61.5: "repeat", 62.0: "repeated"}, 1000, None),  # tried again
    ],
)  # fmt: skip
def test_the_clock_that_took_the_samples_is_compared_with_the_parents(
    monkeypatch, reads, milliseconds, problem
) -> None:
    """Each read of the pipe is of phases, at a time."""
    clock = [0.9]
    monkeypatch.setattr("jobs.process.child.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(child, "waited_s", lambda pid: 7 + clock[0] / 10 * (milliseconds == 1001))
    process: Any = SimpleNamespace(pid=1, alive=lambda: True, note_descendants=lambda: None)
    watch = child.DeadlineWatch(process, _start=0.0, _read=0.9)
    done = messages.Measured(Measurement((Metric("time", "ms", 1.0),)))
    for clock[0], phases in {**reads, 99.0: ""}.items():
        names = re.findall(r"timed|time|first run|warm-up|repeated|repeat", phases)
        events: list[Any] = [messages.Beat(name, milliseconds) for name in names] if clock[0] < 99 else [done]
        process.inbox = SimpleNamespace(receive=lambda wait, events=events: events)
        if (end := watch.step()[1]) is not None:
            break
    assert end is not None
    assert (end.state, end.result) == ((PointState.ERROR, None) if problem else (PointState.OK, done))
    what = "timed calls" if "timed" in str(reads) else "the same calls in a row"
    assert str(end.reason).startswith(f"WrongResult: {what} {problem}" if problem else "None")


SINGLE_SAMPLES = """
import time, torch
from types import SimpleNamespace
from jobs.measure import clock
real, last, called = time.perf_counter, 0.0, False
def call():
    global called
    time.sleep(0.03)
    called = True
def lagging():
    global last, called
    now = real()
    if called:
        called = False
        return last + (now - last) / 8 if now - last < 1 else now
    last = now
    return now
clock.perf_counter, clock.entry_points = lagging, lambda group: [SimpleNamespace(module="time")]
clock._REPEATED_S = 0.5
plan = clock.TimingSpec(repeats=2, min_s=0, warmup=1)
value = clock.measure_time(call, torch.device("cpu"), plan, beat, tries=1).samples_ms[0]
"""


def test_a_clock_that_is_wrong_for_single_samples_alone_is_found(measure) -> None:
    [end] = ended(measure(SINGLE_SAMPLES))
    assert end.outcome.state is PointState.ERROR
    assert re.match("WrongResult: the same calls in a row took [01]", str(end.outcome.reason))


@pytest.fixture
def channel() -> Iterator[Channel]:
    fd = os.open(os.devnull, os.O_WRONLY)
    yield Channel(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("value = float('nan')", ValueError, "metric time is not finite"),
        ("beat.sample(1, {'lost': 1.0})", ValueError, "series lost: is not declared by this name"),
    ],
)
@pytest.mark.usefixtures("snippet_kind")
def test_a_measurement_that_is_not_as_declared_is_an_error(
    channel: Channel, code: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        measure_point(MeasurePoint("snippet", {"code": code}, "cpu"), channel)


def test_sigterm_while_a_point_is_prepared_cancels_it(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []

    def imported(_name: str) -> SimpleNamespace:
        signal.raise_signal(signal.SIGTERM)
        return SimpleNamespace(QUANTITIES=(), measure=measured.append)

    monkeypatch.setattr(point, "kind_module", imported)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(Interrupted, match="SIGTERM came before the measurement had begun: nsa submit SPEC"):
            measure_point(MeasurePoint("snippet", {}, "cpu"), channel)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert measured == []


class Clock:
    """The seconds that a test lets pass."""

    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("orchestrator.execute.live.time.monotonic", lambda: clock.now)
    return clock


def _train(pace: Pace, clock: Clock, steps: range, each_s: float, after: Callable[[int], None]) -> list[float | None]:
    """Train 500 steps as `steps` has them, with what comes after each; returns the rates."""
    rates = []
    for step in steps:
        rates.append(pace.note("train", step, 500)[2])
        clock.now += each_s
        after(step + 1)
    return rates


def test_checkpoints_and_losses_between_the_steps_count_and_do_not_hide_the_pace(clock: Clock) -> None:
    pace, checkpoints = Pace(), []

    def between(step: int) -> None:
        if step % 25 == 0:
            for done in range(2):
                pace.note("heldout loss", done, 2)
            checkpoints.append(pace.note("checkpoint", 0, 0))
            clock.now += 2.5
            checkpoints.append(pace.note("checkpoint", 7, 0))

    rates = _train(pace, clock, range(300), 0.1, between)
    assert all(rates[15:]), "from a second on"
    assert rates[-25] == pytest.approx(5, rel=0.05), "25 steps and a checkpoint take 5 s"
    assert [checkpoint[:2] for checkpoint in checkpoints[1:3]] == [(24, 500), (49, 500)]
    assert all(rate for *_, rate in checkpoints)


def test_a_restart_begins_a_new_pace_and_another_phase_has_its_own(clock: Clock) -> None:
    pace = Pace()
    assert pace.note("corpus", 0, 0) == (0, 0, None)
    clock.now += 2
    assert pace.note("corpus", 8, 0) == (8, 0, 4)
    _train(pace, clock, range(100), 0.1, lambda _: None)
    assert pace.note("checkpoint", 3, 0)[:2] == (99, 500)
    assert pace.note("comparison", 0, 0) == (0, 0, None), "it interrupts nothing"
    assert pace.note("train", 50, 500) == (50, 500, None)
    clock.now += 2
    assert pace.note("train", 60, 500) == (60, 500, 5)
    pace.note("train", 499, 500)
    assert pace.note("memory", 3, 0) == (3, 0, None), "the training is done"
